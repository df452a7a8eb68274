"""What can go wrong: the table of causes (`table`), the code that detects or records them, and the incident (`blame`).

The attempt machine calls it (`group/`, `reports`, `deadlines`, `machine`).
It never re-forms a group and never talks to a worker: it changes the state, and adds commands to the turn.
"""
