"""Who gets which workers: `market` has the values, `decide` is the policy over the other modules.

    market       jobs, nodes and projects; decisions
    facts        what follows from one job alone
    room         places for workers on nodes
    plan         the books of one decision
    admission    who runs
    gains        who gets what no minimum needs
    explaining   the words

The control loop and the simulator call `decide` with all jobs and nodes, and carry out its decisions.
It never reads a clock, never talks to Ray, and never changes the state that it is given.
"""
