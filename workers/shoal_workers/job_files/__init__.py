"""The directory of a job on a node, and its outputs: what its program writes there, in the job's storage.

    directory    a copy of the code for each job, shared by its workers on the node; what is removed when
    outputs      collects files into the storage, and restores them; follows no link
    keeper       when that happens: at the start, at checkpoints, once a minute, at the end

Called by the worker's actor; the service reads the storage with `outputs.read_manifests`. It never decides how a job
goes on: an error of the storage is a line in the job's log, except before the program is loaded.
"""
