"""The pure attempt machine: `machine.step(state, event, now) -> (state, commands)`.

The same functions run under the real executor (`supervisor/`) and under tests. Nothing here reads a clock.
"""
