"""How long a failure stops training: Shoal, Ray Train V2 elastic, torchrun and torchft, on the same work and machine.

    python bench/recovery/main.py [--systems shoal,ray_train,torchrun,torchft] [--events worker_kill,...] [--kills 5]
                                  [--params 10m,85m] [--victims away,supervisor,head] [--window 60]
                                  [--seed 1] [--out trials.jsonl] [--again]

The command starts and stops all systems itself. It prints one line of JSON per trial as it ends, then the table, the
ratios and what lost nodes cost. With --out it continues a file of the same machine: a trial that is there is not done
again, unless --again. docs/recovery.md describes what is measured and how.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from choices import some_of
from kit.processes.os_processes import adopt_orphans, end_all
from measurements.machine import describe
from measurements.recovery_tables import node_losses, ratios, table
from measurements.trial import Event, Size, System, Trial, Victim, read_trials
from recovery.cells import Cells
from recovery.peers import ray_train, torchft_replicas, torchrun
from recovery.shoal import plans

_SYSTEMS = {
    System.SHOAL: plans,
    System.RAY_TRAIN: ray_train,
    System.TORCHRUN: torchrun,
    System.TORCHFT: torchft_replicas,
}


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up like Ctrl-C
    machine = describe()
    run = datetime.now(UTC).isoformat(timespec="seconds")
    trials = _earlier(arguments.out, machine, again=arguments.again)
    begun_mono = time.monotonic()

    def emit(trial: Trial) -> None:
        trials.append(trial)
        print(trial.line(), flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(trial.line() + "\n")

    print(json.dumps({"machine": machine}), flush=True)
    if trials:
        print(f"# {len(trials)} trials of {arguments.out} are not done again (--again does them)", flush=True)
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", ignore_cleanup_errors=True) as folder, _nothing_left():
        for params in arguments.params:
            cells = Cells(
                arguments.kills,
                arguments.seed,
                arguments.window,
                params,
                arguments.victims,
                [one for one in trials if not one.failed],
            )
            for system in arguments.systems:
                module = _SYSTEMS[system]
                events = {one for one in module.EVENTS if one in arguments.events and cells.are_left(system, one)}
                if not events:
                    continue
                spent_s = time.monotonic() - begun_mono
                print(f"# {system}, {params} parameters: {', '.join(sorted(events))}; {spent_s:.0f} s", flush=True)
                module.run_events(events, Path(folder) / f"{system}-{params}", cells, _marked(params, run, emit))
    print(f"\n{machine['cpu']}, {machine['memory']}; {machine['system']}; {machine['software']}\n")
    print(table(trials))
    print("\n" + "\n".join([*ratios(trials), *node_losses(trials)]))


def _marked(params: Size, run: str, emit: plans.Emit) -> plans.Emit:
    return lambda trial: emit(dataclasses.replace(trial, params=params, run=run))


def _earlier(out: Path | None, machine: dict[str, str], *, again: bool) -> list[Trial]:
    """The trials that `out` has already; starts the file if it does not exist, or if they are to be done again."""
    if out is None:
        return []
    if out.exists() and not again:
        first = json.loads(out.read_text().partition("\n")[0])
        if first.get("machine") != machine:
            raise SystemExit(
                f"--out {out} has trials of another machine or other versions, {first.get('machine')}; this is "
                f"{machine}. Trials of two machines do not compare: name another file, or use --again to replace it."
            )
        return read_trials(out)
    out.write_text(json.dumps({"machine": machine}) + "\n")
    return []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    systems, events, sizes, victims = list(System), list(Event), list(Size), list(Victim)
    parser.add_argument(
        "--systems", type=some_of(systems), default=systems, metavar="A,B", help=f"of {', '.join(systems)} (all)"
    )
    parser.add_argument(
        "--events", type=some_of(events), default=events, metavar="A,B", help=f"of {', '.join(events)} (all)"
    )
    parser.add_argument(
        "--params", type=some_of(sizes), default=(Size.SMALL,), metavar="A,B", help=f"of {', '.join(sizes)} (10m)"
    )
    parser.add_argument(
        "--victims",
        type=some_of(victims),
        default=(Victim.AWAY,),
        metavar="A,B",
        help=f"whose node is lost, of {', '.join(victims)} (away)",
    )
    parser.add_argument("--kills", type=int, default=5, help="trials of each cell (default 5)")
    parser.add_argument("--window", type=float, default=60.0, help="seconds watched after each signal (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the ranks, steps and moments of the faults")
    parser.add_argument("--out", type=Path, default=None, help="also write the JSON lines to this file, or continue it")
    parser.add_argument("--again", action="store_true", help="replace the trials that --out has")
    arguments = parser.parse_args()
    if Event.CAPACITY in arguments.events and Event.RAYLET_KILL not in arguments.events:
        parser.error(
            f"{Event.CAPACITY} is measured after {Event.RAYLET_KILL}: --events {Event.RAYLET_KILL},{Event.CAPACITY}"
        )
    return arguments


@contextmanager
def _nothing_left() -> Iterator[None]:
    try:
        yield
    finally:
        for pid, command in end_all().items():
            print(f"# ended a process that was left, pid {pid}: {command[:100]}", flush=True)


if __name__ == "__main__":
    main()
