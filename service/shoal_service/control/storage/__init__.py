"""The storage of jobs, as the server reaches it: files of profiles; checkpoints that people verify and delete.

Called by the HTTP edge. Supervisors and workers have their own access; nothing here commits, restores or chooses.
"""
