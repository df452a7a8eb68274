"""Who gets which workers: `market` has the values, `curves` the throughputs, `first_come` today's policy.

The control loop and the simulator call a policy with all jobs and nodes, and carry out its decisions.
It never reads a clock, never talks to Ray, and never changes the state that it is given.
"""
