"""The peers in the recovery benchmark: Ray Train V2 elastic and torchrun, both around one plain training loop.

Called by recovery/main.py. Uses nothing of Shoal's engine and service, except the embedded Ray cluster.
"""
