"""Backup and restore of the database, while a server runs (backup) or while none does (restore).

Called by `shoal backup` and `shoal restore`. It never touches the storage: checkpoints are not part of a backup.
"""
