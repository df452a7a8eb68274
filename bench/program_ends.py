"""The message that a user reads when a program ends by itself: twelve ends, in a script, a loop and a task.

    python bench/program_ends.py [--doors script,loop,task] [--ends zero,exception,...] [--out docs/measured/ends.md]

The jobs of a door run at once, on a server of its own. What each has to say is in tests/kit/worlds/program_ends.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("bench", "tests", "tools"))

from choices import some_of
from kit.processes.os_processes import adopt_orphans
from kit.worlds.program_ends import DOORS, ENDS, Seen, see, submit
from shoal_server import serving

_CPUS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doors", type=some_of([*DOORS]), default=[*DOORS])
    parser.add_argument("--ends", type=some_of([*ENDS]), default=[*ENDS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    adopt_orphans()
    pages = [_HEAD]
    for door in options.doors:
        with tempfile.TemporaryDirectory() as state, serving(Path(state), num_cpus=_CPUS) as server:
            with server.client as client:
                jobs = {submit(client, door, end): end for end in options.ends}
                seen = see(client, jobs)
        pages.append(_table(door, {jobs[job_id]: one for job_id, one in seen.items()}))
        print(pages[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(pages), encoding="utf-8")


_HEAD = """# How a program ends, in the words of its job

Rank 1 of two ends after the eighth step (of a script: the fourth), as the first column says; the other rank is in a
collective. No file and no new step comes meanwhile, and `retry.max_failures` is 0. A script that stands still is not
ended before five minutes; its row is the note of the job after 30 s. An import fails before a group has formed, so a
loop or task has no rank then. Made by `make bench-ends`.
"""


def _table(door: str, seen: dict[str, Seen]) -> str:
    rows = [f"## A {door}\n", "| end | state | reason | ranks | what its user reads |", "|---|---|---|---|---|"]
    for end, words in ENDS.items():
        if (one := seen.get(end)) is not None:
            message = one.message.replace("|", "\\|").replace("\n", " ")
            ranks = ", ".join(map(str, one.ranks))
            rows.append(f"| {words} | {one.state} | {one.reason} | {ranks} | {message} |")
    return "\n".join([*rows, ""])


if __name__ == "__main__":
    main()
