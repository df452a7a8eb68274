"""Shoal in the recovery benchmark: its plans (which events share a cluster), its strikes, its server and its jobs.

Called by recovery/main.py. Knows nothing of the peers.
"""
