"""Jobs whose program ends in one of twelve ways, by each door, and what a user reads of each."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.processes.server import PATIENCE_S
from shoal_api.client import Client

PROGRAMS = Path(__file__).parents[1] / "ends"
DOORS: dict[str, dict[str, Any]] = {
    "script": {"script": {"file": "script.py", "grace_s": 1}},
    "loop": {"loop": {"file": "loop.py"}},
    "task": {
        "task": "tasks:Task",
        "batch": {"global_size": 4, "micro_size": 2},
        "optimizer": {"name": "sgd", "lr": 0.01, "clip_norm": None},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "stop": {"steps": 100},
    },
}
ENDS = {
    "zero": "one rank ends with status 0",
    "exception": "exception",
    "thread": "exception while another thread lives",
    "signal": "signal that it sends itself",
    "os_exit": "`os._exit(3)`",
    "text": "`SystemExit` with a text",
    "interrupt": "`KeyboardInterrupt`",
    "memory": "out of memory",
    "import": "import error",
    "collective": "all ranks wait in collectives",
    "outside": "one rank stands still outside of them",
    "execv": "`os.execv`",
}


_AT = r"\(ends\.py:\d+ in end\(\)\), on rank 1"
_TWICE_MORE = "3 times in a row without a new step or a file with new content"
_HERE = "3 times in a row at the same place, on rank 1"
_BOTH_RECEIVE = r"rank 0 is waiting in the receive.* \(ends\.py:\d+ here\); rank 1 is .* \(ends\.py:\d+ end\)"
_NO_STEP = "6 re-formations in a row completed no step; last: "
_IN_PLACE = {
    "zero": rf"Your code raised SystemExit: 0 {_AT}",
    "exception": rf"Your code raised ValueError: no such sample {_AT}",
    "thread": rf"Your code raised ValueError: no such sample {_AT}",
    "signal": rf"killed by signal 14 \(SIGALRM\) .*{_HERE}; run `shoal check`, and look at the native code",
    "os_exit": rf"exited with 3 after step \d+, {_HERE}; run `shoal check`, and look for os\._exit",
    "text": rf"Your code raised SystemExit: no data {_AT}",
    "interrupt": rf"Your code raised KeyboardInterrupt {_AT}",
    "memory": rf"Your code raised MemoryError {_AT}",
    "import": r"ends\.py:\d+: the node of this worker has no module no_such_module",
    "collective": rf"{_NO_STEP}.*the group hung at step 8.*; before, {_BOTH_RECEIVE}",
    "outside": rf"{_NO_STEP}rank 1: it did not leave generation \d+.*; before, .*rank 1 is .*\(ends\.py:\d+ end\)",
    "execv": rf"{_NO_STEP}rank 1: process \d+ on \S+ was killed by signal 15",
}
SENTENCES: dict[str, dict[str, str]] = {
    "script": {
        "zero": r"rank 1 of script\.py ended with status 0 while others still trained \(rank 0 was at script\.py:11\), "
        + _TWICE_MORE,
        "exception": rf"Your code raised ValueError: no such sample {_AT}",
        "thread": rf"Your code raised ValueError: no such sample {_AT}",
        "signal": rf"the process of script\.py was killed by signal 14 \(SIGALRM\), on rank 1, {_TWICE_MORE}",
        "os_exit": r"script\.py ended with exit status 3, and its log says why, on rank 1\.",
        "text": r"script\.py ended with exit status 1 at ends\.py:\d+ in end\(\): no data, on rank 1\.",
        "interrupt": rf"Your code raised KeyboardInterrupt {_AT}",
        "memory": rf"MemoryError {_AT}, {_TWICE_MORE}",
        "import": r"Your code raised ModuleNotFoundError: No module named 'no_such_module' \(ends\.py:\d+\), on ranks",
        "collective": _BOTH_RECEIVE,
        "outside": r"rank 0 is waiting in the all-reduce \(script\.py:\d+ <module>\); rank 1 is in its code "
        r"\(ends\.py:\d+ end\)",
        "execv": r"script\.py ended with exit status 1, and its log says why, on rank 1\.",
    },
    "loop": _IN_PLACE,
    "task": {
        **_IN_PLACE,
        "collective": r"ends\.py:\d+ in end\(\) calls the collective recv\(\) of torch\.distributed",
    },
}
"""Regular expressions of what is read, by door and end."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a user reads of a job that has ended, or that stands still."""

    state: str
    reason: str
    message: str
    ranks: tuple[int, ...]
    line: str


def submit(client: Client, door: str, end: str) -> str:
    document = {
        "name": f"{door}-{end.replace('_', '-')}",
        **DOORS[door],
        "code": {"working_dir": str(PROGRAMS), "env": {"END": end}},
        "elasticity": {"min_workers": 2, "max_workers": 2},
        "retry": {"max_failures": 0},
        "health": {"hang_floor_s": 4.0},
    }
    return client.submit(document).id


def see(client: Client, jobs: Iterable[str]) -> dict[str, Seen]:
    """What is read of each of the jobs. A script that stands still is cancelled once its note says where its ranks
    are: it counts as hung after five minutes only."""
    seen: dict[str, Seen] = {}
    left, deadline = list(jobs), time.monotonic() + 6 * PATIENCE_S
    while left and time.monotonic() < deadline:
        for job_id in left:
            job = client.job(job_id)
            status = job.status
            if not status.state.ended and not _stands(status.note):
                continue
            if not status.state.ended:
                client.cancel(job_id)
            failure = status.failure
            seen[job_id] = Seen(
                state=str(status.state),
                reason=str(status.reason or ""),
                message=status.message if status.state.ended else status.note,
                ranks=failure.ranks if failure is not None else (),
                line=failure.line if failure is not None else "",
            )
            left.remove(job_id)
        time.sleep(0.5)
    assert not left, [client.job(job_id).status for job_id in left]
    return seen


def _stands(note: str) -> bool:
    """Its ranks have been looked at, some moments after it was seen to stand still."""
    return re.search(r"in script .*counts as hung after .*; ranks? ", note) is not None


def wrong(door: str, end: str, seen: Seen) -> str:
    """What is not as it has to be; empty if all is."""
    is_named = "rank" in seen.message or (seen.ranks == (1,)) is not (end == "import")  # ranks are those of a group
    is_said = re.search(SENTENCES[door][end], seen.message) is not None
    return "" if is_named and is_said else f"{door} {end}: {seen}"
