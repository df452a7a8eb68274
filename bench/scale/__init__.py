"""The supervisor and the control plane of a job with thousands of workers, and real workers in numbers.

Called by `make bench-scale`. `main.py` and `passes.py` train nothing, and start neither Ray nor torch: `world` has the
shipped supervisor with workers that only answer, `control_plane` stores its reports. `real_workers.py` kills workers of
a real job.
"""
