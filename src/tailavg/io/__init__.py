"""The layout of saved states, and atomic files and folders. Read `state.py` first."""
