"""The attempt machine: `machine.step(state, event, now, plan) -> (state, commands)` decides all about an attempt.

`supervisor/executor.py` calls it for every event and carries out the commands; the unit tests call it with fakes.
It reads no clock, waits for nothing and changes no value in place: all that it knows is in its arguments.
"""
