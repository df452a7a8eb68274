"""What keeps a backup from being made or restored."""

from __future__ import annotations


class BackupError(ValueError):
    """Nothing was changed, unless the message says so; it names the way out."""

    code = "backup_failed"
