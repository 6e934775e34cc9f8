"""Decisions, on Python numbers: windows, the equation, rules, the clock, the state. No framework."""
