"""Tries the configured database: opens it, which also brings its schema up to date, and asks it something."""

from __future__ import annotations

from shoal_api.cli.doctor.findings import Finding, Verdict


def try_database(url: str | None) -> Finding:
    """`url`: None takes the one that `shoal serve` would take."""
    from shoal_service.settings import Settings
    from shoal_service.store import Store, StoreUnavailable

    tried = url or Settings().database_url
    try:
        store = Store.open(tried)
    except StoreUnavailable as error:
        return Finding(check="database", verdict=Verdict.FAIL, message=str(error), hint="set --database-url")
    try:
        if store.ping():
            return Finding(check="database", verdict=Verdict.OK, message=f"{tried.split('://')[0]} answers")
        return Finding(check="database", verdict=Verdict.FAIL, message="the database does not answer")
    finally:
        store.close()
