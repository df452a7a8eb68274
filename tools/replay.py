"""Replays a job trace under the service's policy and under peers, and compares completion times.

    python tools/replay.py TRACE [--policy NAME ...] [--nodes 4] [--workers-per-node 4] [--capacity FILE.csv]
                                    [--projects FILE.yaml] [--picture FILE.svg]

docs/simulation.md explains the files and names the policies. Default: all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml
from rich.console import Console

from schedule_picture import Panel, draw, title
from schedulers import POLICIES
from shoal_api.cli.render.plan import Simulated, render_simulation
from shoal_service.simulator.engine import Market
from shoal_service.simulator.metrics import measure
from shoal_service.simulator.traces import Capacity, parse_projects, read_capacity, read_trace


def main() -> None:
    arguments = _arguments()
    trace = read_trace(arguments.trace)
    projects = arguments.projects
    market = Market(
        capacity=read_capacity(arguments.capacity, arguments.workers_per_node)
        if arguments.capacity
        else Capacity.constant(arguments.nodes, arguments.workers_per_node),
        projects=parse_projects(yaml.safe_load(projects.read_text("utf-8")), projects.name) if projects else {},
    )
    runs = {
        name: POLICIES[name].run(trace.jobs, market, use_rules=True)
        for name in dict.fromkeys(arguments.policy or POLICIES)
    }
    compared = [Simulated(name, run, measure(run, market)) for name, run in runs.items()]
    if arguments.picture is not None:
        panels = [Panel(title(one), one.run) for one in compared]
        arguments.picture.write_text(draw(panels, market.capacity), encoding="utf-8")
    Console().print(*render_simulation(trace, market, compared, restart_costs=False), sep="\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policy", action="append", choices=list(POLICIES))
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--workers-per-node", type=int, default=4)
    parser.add_argument("--capacity", type=Path)
    parser.add_argument("--projects", type=Path)
    parser.add_argument("--picture", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
