"""Everything that runs on a node of the cluster: engine, checkpoints, snapshot store, data, tasks, and the contract.

Started by the service (actor.py) or by torchrun (run.py). Importing it does nothing. Never imports the service or the
API.
"""
