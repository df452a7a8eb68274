"""Hot update of the job's code: new workers start beside the old ones, take over at a step boundary, and are on trial.

    update     from the request until the new code takes over, or is refused
    trial      from then until it is accepted, or rolled back

`machine`, `reports`, `worker_pool` and `group/` call it. It never ends an attempt, and forms no group itself.
"""
