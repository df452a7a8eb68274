"""How long a failure stops training: Shoal, Ray Train V2 elastic and torchrun, on the same work and machine.

    python bench/recovery/main.py [--systems shoal,ray_train,torchrun] [--events worker_kill,...] [--kills 5]
                                  [--seed 1] [--out trials.jsonl]

The command starts and stops all systems itself. It prints one line of JSON per trial as it ends, then the table and the
ratios. docs/measured/recovery.md describes what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from choices import some_of
from kit.processes.os_processes import adopt_orphans, end_all
from measurements.machine import describe
from measurements.recovery_tables import ratios, table
from measurements.trial import Event, System, Trial
from recovery.peers import ray_train, torchrun
from recovery.shoal import plans

_EVENTS = {System.SHOAL: plans.EVENTS, System.RAY_TRAIN: ray_train.EVENTS, System.TORCHRUN: torchrun.EVENTS}


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up like Ctrl-C
    machine = describe()
    trials: list[Trial] = []
    begun_mono = time.monotonic()

    def emit(trial: Trial) -> None:
        trials.append(trial)
        print(trial.line(), flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(trial.line() + "\n")

    print(json.dumps({"machine": machine}), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": machine}) + "\n")
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", ignore_cleanup_errors=True) as folder, _nothing_left():
        for system in arguments.systems:
            events = set(_EVENTS[system]) & set(arguments.events)
            if not events:
                continue
            place = Path(folder) / system
            print(f"# {system}: {', '.join(sorted(events))}; {time.monotonic() - begun_mono:.0f} s", flush=True)
            match system:
                case System.SHOAL:
                    plans.run_events(events, place, kills=arguments.kills, seed=arguments.seed, emit=emit)
                case System.RAY_TRAIN:
                    ray_train.run_events(events, place, kills=arguments.kills, seed=arguments.seed, emit=emit)
                case System.TORCHRUN:
                    torchrun.run_events(events, place, kills=arguments.kills, seed=arguments.seed, emit=emit)
    print(f"\n{machine['cpu']}, {machine['memory']}; {machine['system']}; {machine['software']}\n")
    print(table(trials))
    print("\n" + "\n".join(ratios(trials)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    systems, events = list(System), list(Event)
    parser.add_argument(
        "--systems", type=some_of(systems), default=systems, metavar="A,B", help=f"of {', '.join(systems)} (all)"
    )
    parser.add_argument(
        "--events", type=some_of(events), default=events, metavar="A,B", help=f"of {', '.join(events)} (all)"
    )
    parser.add_argument("--kills", type=int, default=5, help="trials of each event and system (default 5)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the ranks, steps and moments of the faults")
    parser.add_argument("--out", type=Path, default=None, help="also write the JSON lines to this file")
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
