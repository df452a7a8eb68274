"""Loops of the user's own, run in place: what `shoal.run(train)` is given. Imports the program of the engine that runs
such a loop, and the objects that the loop sees."""
