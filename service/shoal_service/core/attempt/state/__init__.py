"""The attempt's state: frozen dataclasses, one per part, and one per stage for what only that stage knows.

`machine.step` and what it calls read it and replace parts of it; `supervisor/journal.py` writes it as JSON and reads it
back; `supervisor/reporting/status.py` shows it. It never decides anything, and no value in it is ever mutated.
"""
