"""What people read about the division of workers: why a grant changes (`reasons`), why a queued job waits (`waiting`),
and why a running job gets no more workers (`held_back`).

Called by `decide` and by the control loop. It repeats decisions in words, with the numbers that they used, and takes
none.
"""
