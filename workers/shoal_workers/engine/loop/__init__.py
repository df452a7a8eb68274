"""Loops of the user's own, run in place: the program that calls `train(run)` in each generation (loop_program), what
the function sees (run), the end of its steps (boundary) and the state that it names (tracked).

Called by the engine, and by `shoal.run` (entry). It knows no task, and never decides what a loop trains.
"""
