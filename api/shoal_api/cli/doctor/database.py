"""Tries the configured database without changing it. Migrating an older schema is the task of the server."""

from __future__ import annotations

import os
from pathlib import Path

from shoal_api.cli.doctor.findings import Finding, Verdict

_SQLITE = "sqlite:///"


def try_database(url: str | None) -> Finding:
    """Connect to the database. `url`: None for the one that `shoal serve` would use."""
    from shoal_service.settings import SettingsError, load_settings
    from shoal_service.store import Store, StoreUnavailable
    from shoal_service.store.database import Database

    try:
        tried = url or load_settings().database_url
        if tried.startswith(_SQLITE) and not Path(tried.removeprefix(_SQLITE)).exists():
            return judge_new_file(Path(tried.removeprefix(_SQLITE)))
        store = Store(Database(tried))
        try:
            store.ping()
        finally:
            store.close()
    except (SettingsError, StoreUnavailable) as error:
        return Finding(
            check="database", verdict=Verdict.FAIL, message=" ".join(str(error).split()), hint="set --database-url"
        )
    return Finding(check="database", verdict=Verdict.OK, message=f"{tried.partition(':')[0]} answers")


def judge_new_file(path: Path) -> Finding:
    """Whether a SQLite file that does not exist yet could be created."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if folder.is_dir() and os.access(folder, os.W_OK):
        return Finding(check="database", verdict=Verdict.OK, message=f"a new SQLite file can be created in {folder}")
    return Finding(
        check="database",
        verdict=Verdict.FAIL,
        message=f"{folder} is not a writable directory",
        hint="give another --state-dir or --database-url",
    )
