"""Scheduling over virtual time: `traces` of jobs and capacity, the `engine` and `metrics`.

`shoal simulate` and bench/schedule call it with any policy of core/scheduling, the one that the service uses included.
It never talks to Ray or to the store, and never reads a clock: a day of a trace takes seconds.
"""
