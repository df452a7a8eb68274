"""The supervisor's access to checkpoint storage: one job's catalog, and the coordinator that runs it in threads.

Called by the executor. It never imports torch, opens no tensor, and does not decide which checkpoint to restore.
"""
