"""Who gets which workers: `market` has the values, `curves` the throughputs, `decide` the policy over the others.

The control loop and the simulator call it with all jobs and nodes, and carry out its decisions.
It never reads a clock, never talks to Ray, and never changes the state that it is given.
"""
