"""Draws tasks as users write them, trains each in many ways, and says whether every way gave the same model.

    seed -> Description     draw.py: pure, no torch; the same seed is the same task for ever
    Description -> task     task.py, pieces.py, optimizers.py: a class that the engine loads as it loads a user's
    task -> what is right   reference.py: a plain loop in one process, also in float64 to know how far rounding reaches
    task -> what came out   lives.py: one worker, a drawn layout, and a life with a resume, a death and another layout
    both -> outcome         outcome.py; shrink.py removes what does not matter from a failing description

Loops have their own draw, program and reference (loops.py, loop_reference.py, tests/kit/loops/drawn.py) and the same
lives and outcomes. Called by tools/fuzz_tasks.py (`make fuzz-tasks`, `make fuzz-loops`), by
tests/dist/tasks/test_drawn_tasks.py and tests/dist/loop/test_drawn_loops.py. Nothing in it knows which kinds work: what
is drawn is equal, refused in one sentence before its first step, or a fault.
"""
