"""The agent of a node: one process that polls the workers of a job on its node, so that the supervisor makes one call.

Started and called by the supervisor (`shoal_service/supervisor/workers/agent_pool.py`). It keeps nothing that would be
lost with it, and never imports torch. `node_polls` imports no Ray either, so that it is tested without a cluster.
"""
