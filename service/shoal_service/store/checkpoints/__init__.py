"""What people do with the checkpoints of a job: pin, delete, note damage. The rows themselves come from supervisors.

Each module's functions work in an open transaction; `CheckpointMethods` is a part of `Store`. No storage is touched.
"""
