"""Between the processes of one node: a lock whose holder's progress the others see, and work that is done once.

    worker 0   | lock | prepare: downloads, tokenises ............. | done |
    worker 1   | "another worker of this node prepares: 45 %" ..... | prepare: finds everything there |
    worker 2   | "another worker of this node prepares: 45 %" ..... | prepare: finds everything there |

Hidden here: the files. The kernel releases the lock when its holder ends, also by SIGKILL. The holder writes its
progress into a file beside the lock; a process that waits reads it, so that waiting for a long preparation does not
look like standing still. Called by the engine for the task's preparation, for text data and for the packages of a job.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from shoal_workers.contract.plain_text import plain_text
from shoal_workers.descriptors import try_lock

_POLL_S = (0.01, 0.2)
"""First and last pause between two looks at the lock."""
_SAY_EVERY_S = 0.2

Say = Callable[[str], None]


@contextmanager
def node_lock(path: Path, on_wait: Say) -> Iterator[Say]:
    """Hold the lock of a file that is never deleted; give a function that shows a progress to the others.

    Args:
        on_wait: called with the holder's progress while another process holds the lock, whenever that changes; at first
            with what is known of it, which may be empty.
    """
    with path.open("ab") as file:
        wait_for_lock(file, fcntl.LOCK_EX, path, on_wait)
        yield shown_to_others(path)


def wait_for_lock(file: IO[bytes], kind: int, path: Path, on_wait: Say) -> None:
    """Take the lock (LOCK_EX, or LOCK_SH together with other waiters) of an open file; `on_wait` as for `node_lock`."""
    seen: str | None = None
    pause_s, last_s = _POLL_S
    while not try_lock(file.fileno(), kind):
        text = progress_of_holder(path)
        if text != seen:
            seen = text
            on_wait(text)
        time.sleep(pause_s)
        pause_s = min(last_s, 1.2 * pause_s)


def shown_to_others(path: Path) -> Say:
    """Called by the holder of the lock: writes a progress for the others, some times per second at most."""
    shown_mono = float("-inf")
    target, temporary = _progress_file(path), _progress_file(path).with_suffix(".writing")

    def say(text: str) -> None:
        nonlocal shown_mono
        if time.monotonic() - shown_mono < _SAY_EVERY_S:
            return
        shown_mono = time.monotonic()
        with suppress(OSError):  # a full disk must not end a preparation: the others see less
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)

    return say


def progress_of_holder(path: Path) -> str:
    """Return an empty text if it has shown nothing yet."""
    try:
        return _progress_file(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _progress_file(path: Path) -> Path:
    return path.with_suffix(".progress")


_LOCK = "prepare.lock"
_DONE = "prepare.done"

Note = Callable[[str], None]


def prepare_once(prepare: Callable[[Note], None], note: Note, directory: Path) -> None:
    """Each worker calls `prepare` in the end, since it may also set attributes of the task: the first one alone, the
    others together, for whom it is done then. If the first dies, one of the others takes its place.

    Args:
        directory: this attempt's own on this node, on a file system of this node.
    """
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
            if try_lock(file.fileno()):
                prepare_alone()
                return
            wait_for_lock(file, fcntl.LOCK_SH, lock, show)
            if done.exists():
                prepare(note)
                return
        # the one that prepared has died, or its code has raised: one of the others tries
