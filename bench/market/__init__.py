"""Jobs that share a real cluster: `six_jobs` is the run of six jobs of two projects, and `urgent_start` looks into the
start of an urgent job.

Run by `make bench-schedule`.
It never simulates: bench/schedule does.
"""
