"""Layouts on this machine: what changing them costs, and whether the planner is right. `main.py` is the command."""
