"""The life of a group: forming, switching, its workers' exits, what follows from how it ended, and snapshots in memory.

`machine`, `deadlines` and `reports` call it. It never starts or drops a spare worker, and never assigns blame.
"""
