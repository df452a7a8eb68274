"""Who is to blame when a group is slow or stands still: decisions about evidence, for people. Pure.

`slow_steps` finds a slow-down and the rank that causes it from the times of all ranks, `links` the node with a bad
link, `standstill` the rank that the others wait for, `incident_suspects` whom an incident suspects.
Called by the supervisor's CulpritFinder and StackTaker. Nothing about the training depends on it.
"""
