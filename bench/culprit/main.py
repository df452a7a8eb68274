"""Does each slow-down and each incident name the right rank? A real job on three hosts, and one fault after the other.

    python bench/culprit/main.py [--rounds 9] [--controls 20] [--kinds cpu,data,...] [--load 0] [--seed 1]
                                 [--out build/culprit.md]

The hosts are network namespaces with a Ray node each (needs root and `tc`); the job has one rank on each. An injection
is right if the first suspect is exactly the rank that it hit; a control, in which nothing happens, if nobody is
suspected. --load keeps as many processes busy beside it. All times are from the injection. Prints a line for each
injection; the table goes to --out. The exit status is 1 if fewer than 95 % are right, somebody was suspected in a
control, or an innocent node was put on probation.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from choices import some_of
from culprit.injections import CONTROL, EVERY_STEPS, KINDS, Outcome, Target, link_tool, run, wait_until_steady
from kit.guard.guard import guard_this_process
from kit.processes.hosts import Hosts, why_not
from kit.processes.os_processes import adopt_orphans, end_all
from kit.processes.server import until
from measurements.machine import describe
from shoal_server import ShoalServer

_STEADY_STEPS = 12
_RIGHT = 0.95


def main() -> None:
    arguments = _arguments()
    if (reason := why_not()) is not None:
        raise SystemExit(f"hosts cannot be made here: {reason}")
    guard_this_process()
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="shoal-culprit-"))
    hosts = Hosts(folder / "hosts", num_hosts=3, cpus_per_host=1)
    server = None
    try:
        hosts.start()
        server = ShoalServer(folder / "state", hosts.serve_options, dict(hosts.environment))
        server.start()
        with _busy(arguments.load):
            outcomes, innocent_nodes = _measure(server, hosts, folder / "gate", arguments)
        tool = link_tool(hosts)
    finally:
        if server is not None:
            server.end()
        hosts.end()
        end_all()
        shutil.rmtree(folder, ignore_errors=True)
    text = _table(outcomes, innocent_nodes, tool, arguments.load)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    faults = [one.is_right for one in outcomes if one.kind != CONTROL]
    are_controls_clean = all(one.is_right for one in outcomes if one.kind == CONTROL)
    sys.exit(int(sum(faults) < _RIGHT * len(faults) or not are_controls_clean or bool(innocent_nodes)))


@contextmanager
def _busy(number: int) -> Iterator[None]:
    """Runs busy processes in a block, each of which uses whatever CPU time it gets."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def _measure(
    server: ShoalServer, hosts: Hosts, gate: Path, arguments: argparse.Namespace
) -> tuple[list[Outcome], list[str]]:
    gate.mkdir()
    draw, outcomes = random.Random(arguments.seed), []
    order = [kind for _ in range(arguments.rounds) for kind in arguments.kinds]
    for _ in range(arguments.controls):
        order.insert(draw.randrange(len(order) + 1), CONTROL)
    with server.client as client:
        job = client.submit(_spec(gate))
        until(lambda: client.job(job.id).status.step > 0, "the job trains", 300)
        target = Target(client, job.id, gate, hosts)
        for kind in order:
            wait_until_steady(target, _STEADY_STEPS)
            outcome = run(target, kind, draw.randrange(3))
            outcomes.append(outcome)
            print(_line(outcome), flush=True)
            if not outcome.is_right:
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
    if one.kind == CONTROL:
        return f"{one.kind:8} {'clean' if one.is_right else f'WRONG {one.innocent}'}  {one.words}"
    after = "-" if one.after_s is None else f"{one.after_s:.1f} s"
    verdict = "right" if one.is_right else f"WRONG ({one.named}, hit was {one.rank})"
    also = f"; also suspected: {one.innocent}" if one.innocent else ""
    return f"{one.kind:8} rank {one.rank}  {verdict}, {one.resource}, after {after}{also}  {one.words}"


def _table(outcomes: list[Outcome], innocent_nodes: list[str], tool: str, load: int) -> str:
    machine = describe()
    faults = [one for one in outcomes if one.kind != CONTROL]
    controls = [one for one in outcomes if one.kind == CONTROL]
    beside = f", with {load} busy processes beside it" if load else ""
    lines = [
        "# Suspects, measured",
        "",
        "One fault after the other hits one of three ranks of a real job, each on its own host (network namespaces)."
        " An injection is right if the first suspect that the job names is exactly that rank. [operations.md]"
        "(../operations.md#who-is-to-blame) says what is looked at; `bench/culprit/injections.py` what the faults are. "
        f"A skipped step (`nan`) names its ranks itself. {tool}",
        "",
        f"Measured with `make bench-culprit` on {machine['cpu']}, {machine['system']}{beside}.",
        "",
        "| fault | injections | right rank | right resource | seconds from the injection, median (max) | "
        "other ranks suspected |",
        "|---|---|---|---|---|---|",
    ]
    for kind in [*dict.fromkeys(one.kind for one in faults), ""]:
        some = [one for one in faults if kind in ("", one.kind)]
        lines.append(
            f"| {kind or 'all'} | {len(some)} | {sum(one.is_right for one in some)} | {_resources(some)} | "
            f"{_spread([one.after_s for one in some])} | {sum(bool(one.innocent) for one in some)} |"
        )
    clean = sum(one.is_right for one in controls)
    lines += ["", f"Controls without a fault: {clean} of {len(controls)} clean."]
    lines += ["", f"Nodes on probation afterwards: {', '.join(innocent_nodes) or 'none'}.", ""]
    return "\n".join(lines)


_EXPECTED = {"stop": "process", "nan": "numbers", "loss": "network", "delay": "network"}


def _resources(outcomes: list[Outcome]) -> int:
    return sum(one.resource == _EXPECTED.get(one.kind, one.kind) for one in outcomes)


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} ({max(known):.2f})" if known else "-"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--controls", type=int, default=20, help="times in which nothing is done (20)")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the job (0)")
    parser.add_argument("--kinds", type=some_of(tuple(KINDS)), default=tuple(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
