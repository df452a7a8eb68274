"""Tries the configured database without changing it: a schema that is behind is the server's business."""

from __future__ import annotations

import os
from pathlib import Path

from shoal_api.cli.doctor.findings import Finding, Verdict

_SQLITE = "sqlite:///"


def try_database(url: str | None) -> Finding:
    """`url`: None takes the one that `shoal serve` would take."""
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
    """A SQLite database that is not there yet: could it be made?"""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if folder.is_dir() and os.access(folder, os.W_OK):
        return Finding(check="database", verdict=Verdict.OK, message=f"a new sqlite file can be made in {folder}")
    return Finding(
        check="database", verdict=Verdict.FAIL, message=f"{folder} is not a directory that can be written to",
        hint="give another --state-dir or --database-url",
    )  # fmt: skip
