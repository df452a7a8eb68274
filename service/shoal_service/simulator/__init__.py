"""Virtual time: scheduling over many jobs, and one job under failures.

    traces, engine, metrics          jobs and capacity under a policy of core/scheduling, the service's own included
    failures, recovery_costs, twin   one job whose attempt machine meets drawn failures; time_account has its time

`shoal simulate`, bench/schedule and bench/twin.py call it. It never talks to Ray or to the store, and never reads a
clock: a day of a trace takes seconds.
"""
