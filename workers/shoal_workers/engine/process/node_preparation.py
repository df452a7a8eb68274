"""The task's preparation, once per node: the first worker alone, then the others together, for whom it is done.

    worker 0   | lock | prepare: downloads, tokenises ............. | done |
    worker 1   | "another worker of this node prepares: 45 %" ..... | prepare: finds everything there |
    worker 2   | "another worker of this node prepares: 45 %" ..... | prepare: finds everything there |

If the first dies, one of the others takes its place. Each worker calls the task's `prepare` in the end, since it may
also set attributes of the task. Called by the engine on the training thread.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

from shoal_workers.contract.plain_text import plain_text
from shoal_workers.data.lock import has_locked, shown_to_others, wait_for_lock

_LOCK = "prepare.lock"
_DONE = "prepare.done"

Note = Callable[[str], None]


def prepare_once(prepare: Callable[[Note], None], note: Note, directory: Path) -> None:
    """`directory`: of this job's attempt on this node, on a file system of this node."""
    lock, done = directory / _LOCK, directory / _DONE

    def prepare_alone() -> None:
        say = shown_to_others(lock)

        def note_and_say(text: str) -> None:
            text = plain_text(text)
            note(text)
            say(text)

        prepare(note_and_say)
        done.touch()

    def show(text: str) -> None:
        note(f"another worker of this node prepares{': ' if text else ''}{text}")

    while True:
        with lock.open("ab") as file:
            if has_locked(file, fcntl.LOCK_EX):
                prepare_alone()
                return
            wait_for_lock(file, fcntl.LOCK_SH, lock, show)
            if done.exists():
                prepare(note)
                return
        # the one that prepared has died, or its code has raised: one of the others tries
