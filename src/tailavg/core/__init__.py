"""Decisions on Python numbers: windows, the equation, rules, the clock, states. No framework."""
