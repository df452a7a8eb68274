"""The gateway: the one process that speaks Ray for the service. It runs in, or beside, a Ray cluster and dials out.

    service, REST edge   <-- reports, answers (POST) --  gateway.py  -->  ray_cluster.py  -->  Ray
                         --- orders (long poll) ------>  gateway.py

`shoal serve` starts one for its own cluster, `shoal join` runs one for a cluster elsewhere (`process.py`). It has the
Ray cluster's token and a token of the service that is good for this one cluster; nothing of the database. It decides
nothing about a job: what it does is an order, or a report of what it sees. No other package imports this one.
"""
