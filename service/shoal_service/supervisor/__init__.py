"""One supervisor per job attempt: the Ray actor, its executor around the attempt machine, and its calls to workers.

`control` starts it and pulls its reports. It never decides (`core.attempt` does) and never touches the database.
"""
