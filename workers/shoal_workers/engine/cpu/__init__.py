"""What only a CPU can do: a state that lives in shared memory, which outlives its worker, and a log of its gradients.

Called by `build_runtime` through `state_of`, and from then on through the interface `state/device_state.py`; nothing
else of the engine imports it. It never decides when a snapshot is taken or sent.
"""
