"""When the newest backup was made: a file in the state directory, whose time of change says it.

`shoal backup` writes it and a control plane with the same directory exposes it. It is no part of the database, so a
database that is restored does not claim the backups of another.
"""

from __future__ import annotations

from pathlib import Path

_NAME = "backed-up"


def mark_backup(state_dir: Path) -> None:
    """Nothing where there is no state directory: a backup of PostgreSQL may be made on a machine without a server."""
    if state_dir.is_dir():
        (state_dir / _NAME).touch(mode=0o600)


def newest_backup_at(state_dir: Path) -> float | None:
    """Unix time; None: none was made with this directory."""
    try:
        return (state_dir / _NAME).stat().st_mtime
    except FileNotFoundError:
        return None
