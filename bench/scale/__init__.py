"""The supervisor and the control plane of a job with thousands of workers. `main.py` is the command.

Called by `make bench-scale`. `world` has the shipped supervisor with workers that only answer, `control_plane` stores
its reports. It trains nothing, and starts neither Ray nor torch.
"""
