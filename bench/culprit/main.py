"""Does each slow-down and each incident name the right rank? A real job on three hosts, and one fault after the other.

    python bench/culprit/main.py [--rounds 8] [--kinds cpu,data,...] [--seed 1] [--out build/culprit.md]

The hosts are network namespaces with a Ray node each (needs root and `tc`); the job has one rank on each. An injection
is right if the first suspect is exactly the rank that it hit. Prints a line for each injection; the table goes to
--out. The exit status is 1 if fewer than 95 % are right, a suspect came more than 1 s after the threshold, or an
innocent node was put on probation.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from choices import some_of
from culprit.injections import EVERY_STEPS, KINDS, Outcome, Target, run, wait_until_steady
from kit.processes.hosts import Hosts, why_not
from kit.processes.os_processes import adopt_orphans, end_all
from kit.processes.server import until
from measurements.machine import describe
from shoal_server import ShoalServer

_STEADY_STEPS = 12
_RIGHT, _LATE_S = 0.95, 1.0


def main() -> None:
    arguments = _arguments()
    if (reason := why_not()) is not None:
        raise SystemExit(f"hosts cannot be made here: {reason}")
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="shoal-culprit-"))
    hosts = Hosts(folder / "hosts", num_hosts=3, cpus_per_host=1)
    server = None
    try:
        hosts.start()
        server = ShoalServer(folder / "state", [f"--ray-address={hosts.address}"], dict(hosts.environment))
        server.start()
        outcomes, innocent_nodes = _measure(server, hosts, folder / "gate", arguments)
    finally:
        if server is not None:
            server.end()
        hosts.end()
        end_all()
        shutil.rmtree(folder, ignore_errors=True)
    text = _table(outcomes, innocent_nodes)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    late = [one.late_s for one in outcomes if one.late_s is not None]
    right = sum(one.is_right for one in outcomes) / len(outcomes)
    sys.exit(int(right < _RIGHT or max(late, default=0.0) > _LATE_S or bool(innocent_nodes)))


def _measure(
    server: ShoalServer, hosts: Hosts, gate: Path, arguments: argparse.Namespace
) -> tuple[list[Outcome], list[str]]:
    gate.mkdir()
    order = [(kind, turn) for turn in range(arguments.rounds) for kind in arguments.kinds]
    draw, outcomes = random.Random(arguments.seed), []
    with server.client as client:
        job = client.submit(_spec(gate))
        until(lambda: client.job(job.id).status.step > 0, "the job trains", 300)
        target = Target(client, job.id, gate, hosts)
        for kind, _ in order:
            wait_until_steady(target, _STEADY_STEPS)
            outcome = run(target, kind, draw.randrange(3))
            outcomes.append(outcome)
            print(_line(outcome), flush=True)
            if outcome.named is None:
                last = client.series(job.id, after_step=max(0, client.job(job.id).status.step - 25))
                print("    seconds of the last steps:", *(f"{point.step_s:.2f}" for point in last), flush=True)
        wait_until_steady(target, 3)
        probation = [node.ip for node in client.nodes() if node.on_probation]
        client.cancel(job.id)
        client.wait(job.id, timeout_s=120)
    return outcomes, probation


def _spec(gate: Path) -> dict[str, Any]:
    return {
        "name": "steady",
        "task": "steady:Steady",
        "code": {"working_dir": str(Path(__file__).parent / "task")},
        "data": {"gate": str(gate)},
        "batch": {"global_size": 6, "micro_size": 2},
        "stop": {"steps": 1_000_000},
        "elasticity": {"min_workers": 3, "max_workers": 3},
        "checkpoint": {"every_steps": EVERY_STEPS},
        "health": {"non_finite": "skip", "max_non_finite": 1000, "hang_floor_s": 4.0, "probation_s": 3.0},
    }


def _line(one: Outcome) -> str:
    late = "-" if one.late_s is None else f"{one.late_s:.2f} s"
    after = "-" if one.after_s is None else f"{one.after_s:.1f} s"
    verdict = "right" if one.is_right else f"WRONG ({one.named}, hit was {one.rank})"
    also = f"; also suspected: {one.innocent}" if one.innocent else ""
    return f"{one.kind:8} rank {one.rank}  {verdict}, {one.resource}, after {after}, late {late}{also}  {one.words}"


def _table(outcomes: list[Outcome], innocent_nodes: list[str]) -> str:
    machine = describe()
    lines = [
        "# Suspects, measured",
        "",
        "One fault after the other hits one of three ranks of a real job, each on its own host (network namespaces)."
        " An injection is right if the first suspect that the job names is exactly that rank. [operations.md]"
        "(../operations.md#who-is-to-blame) says what is looked at; `bench/culprit/injections.py` what the faults are. "
        "A skipped step (`nan`) names its ranks itself.",
        "",
        f"Measured with `make bench-culprit` on {machine['cpu']}, {machine['system']}.",
        "",
        "| fault | injections | right rank | right resource | seconds from the injection, median (max) | "
        "seconds after the threshold, median (max) | other ranks suspected |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in [*dict.fromkeys(one.kind for one in outcomes), ""]:
        some = [one for one in outcomes if kind in ("", one.kind)]
        lines.append(
            f"| {kind or 'all'} | {len(some)} | {sum(one.is_right for one in some)} | {_resources(some)} | "
            f"{_spread([one.after_s for one in some])} | {_spread([one.late_s for one in some])} | "
            f"{sum(bool(one.innocent) for one in some)} |"
        )
    lines += ["", f"Nodes on probation afterwards: {', '.join(innocent_nodes) or 'none'}.", ""]
    return "\n".join(lines)


_EXPECTED = {"stop": "process", "diverge": "program", "nan": "numbers", "loss": "network", "delay": "network"}


def _resources(outcomes: list[Outcome]) -> int:
    return sum(one.resource == _EXPECTED.get(one.kind, one.kind) for one in outcomes)


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} ({max(known):.2f})" if known else "-"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kinds", type=some_of(tuple(KINDS)), default=tuple(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
