"""Questions to the planner from outside: what they are, what answers them, and the process that bounds their cost.
Called by the HTTP edge and by the command line.
It submits and runs nothing.
"""
