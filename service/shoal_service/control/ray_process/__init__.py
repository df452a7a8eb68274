"""The process with the connection to Ray: the only one of the control plane that unpickles what workers' nodes send.

    control plane            socket pair, JSON            ray_process                    Ray
    RemoteCluster  ---- request, arguments ---->  child.py -> RayCluster ---- calls ---->  supervisors
    (no Ray, pydantic) <---- answer, JSON -----   (no database, no token) <-- pickles ---

The child has the token of the Ray cluster, and nothing of the database or of the API. What it answers is validated and
bounded (`calls.py`), so that a pickle which runs code in the child does not run it where the database is.
"""
