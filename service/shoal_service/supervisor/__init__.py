"""One supervisor per job attempt: the Ray actor, its executor around the attempt machine, and its calls to workers.

`gateway` starts it, and it reports to the service. It never decides (`core.attempt` does) and never touches the
database.
"""
