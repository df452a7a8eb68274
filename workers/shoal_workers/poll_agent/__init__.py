"""The agent of a node: one process that polls the workers of a job on its node, so that the supervisor makes one call.

Started and called by the supervisor (`shoal_service/supervisor/workers/polling`). It keeps nothing that would be lost
with it, and never imports torch.
"""
