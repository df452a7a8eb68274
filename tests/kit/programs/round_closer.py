"""Program of a control plane that only closes rounds of islands, and that SIGKILL ends at a named place in it.

python round_closer.py DATABASE_URL [PLACE]     until its standard input ends
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import Any

from sqlalchemy import Engine, event

from shoal_service.control.islands import find_runs, look_at
from shoal_service.store import Store, driving
from shoal_workers.contract.islands import DECISION
from shoal_workers.contract.marker import MARKER_NAME

_POLL_S = 0.05
_TTL_S = 1.0
PLACES = ("arrived", "noted", "stored", "written")
"""The differences lie in the storage; the transaction has them; it is committed; the islands can read the decision."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(place: str) -> None:
    """With hooks of Python and SQLAlchemy, before the first effect after that place."""

    def on_audit(name: str, arguments: tuple[Any, ...]) -> None:
        is_next = {
            "arrived": name == "os.link" and arguments[1] == MARKER_NAME,
            "stored": name == "os.link" and arguments[1] == DECISION,
            "written": name == "os.remove" and str(arguments[0]).startswith(f"{DECISION}."),  # the draft of it
        }
        if is_next.get(place, False):
            _die()

    def on_statement(_: Any, __: Any, statement: str, *___: Any) -> None:
        if place == "noted" and statement.startswith("UPDATE island_rounds"):
            _die()

    sys.addaudithook(on_audit)
    event.listen(Engine, "before_cursor_execute", on_statement)


def main(url: str, place: str = "") -> None:
    store = Store.open(url)
    lease = None
    while lease is None:  # that of the one before has to end first
        lease = store.acquire_lease(f"closer-{os.getpid()}", ttl_s=_TTL_S, now=time.time())
    _die_at(place)
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        for run in find_runs(store.reading(driving.to_drive)(), "/nowhere"):
            look_at(store, run, epoch=lease.epoch, now=time.time())


if __name__ == "__main__":
    main(*sys.argv[1:])
