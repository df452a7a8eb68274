"""Random faults for minutes, and then everything must add up. `main.py` is the command."""
