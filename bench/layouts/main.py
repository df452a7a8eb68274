"""What layouts cost on this machine, and how well the planner predicts it: `make bench-layouts`.

    python bench/layouts/main.py [--parts relayout,moving,reality,techniques,planner] [--steps 7] [--out layouts.json]

    relayout     how long training of 4 workers pauses when the job is switched to another layout
    moving       moving 2.2 GB of state from one layout's snapshot in memory into another layout
    reality      memory and step time of 26 layouts of 1 to 8 processes against the planner's prediction
    techniques   activation checkpointing, ZeRO levels and offload: memory saved, measured and predicted
    planner      seconds to rank all layouts of 1,024 and 16,384 GPUs

Takes about ten minutes on an idle machine. Prints the tables first; the last line is JSON. The exit status is 0 if
every figure is within its limit. tools/layouts_page.py generates the tables of the documentation from the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from choices import some_of
from layouts import cases, moving, reality, relayout, techniques
from measurements import layout_tables as tables
from measurements.machine import describe
from planner import measure_planner
from shoal_service.control.planning import measure_profile
from shoal_service.planner import HardwareProfile
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.prepare import prepare_corpus

_PARTS = ("relayout", "moving", "reality", "techniques", "planner")


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up like Ctrl-C
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    document: dict[str, Any] = {"machine": describe(), "load_average": os.getloadavg()[0]}
    prepare_corpus(TextDataConfig(corpus="python-stdlib"), lambda _: None)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", ignore_cleanup_errors=True) as folder:
        for part in arguments.parts:
            _print_now(f"\n# {part}\n")
            document[part] = _measure(part, Path(folder) / part, arguments)
            _print_now("\n" + _table(part, document[part]))
    document["passed"] = all(document[part]["passed"] for part in arguments.parts)
    line = json.dumps(document)
    if arguments.out is not None:
        arguments.out.write_text(line + "\n")
    print(f"\n{line}")
    return 0 if document["passed"] else 1


def _measure(part: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    match part:
        case "relayout":
            return relayout.summary(relayout.measure_changes(folder, _print_now))
        case "moving":
            return moving.summary(moving.measure_moves(_print_now))
        case "reality":
            profile = _profile()
            found = reality.compare(cases.REALITY, profile, folder, _print_now, timed_steps=arguments.steps)
            return {"profile": profile.model_dump(mode="json"), **reality.summary(found)}
        case "techniques":
            return techniques.measure(folder, _print_now)
        case "planner":
            return measure_planner(trials=3)
    raise AssertionError(part)


def _table(part: str, figures: dict[str, Any]) -> str:
    match part:
        case "relayout":
            return tables.changes_table(figures)
        case "moving":
            return tables.moves_table(figures)
        case "reality":
            return tables.reality_table(figures)
        case "techniques":
            return tables.techniques_table(figures)
        case "planner":
            return tables.planner_table(figures["planner"])
    raise AssertionError(part)


def _profile() -> HardwareProfile:
    return measure_profile(name="this-machine", max_processes=cases.WORLD, seconds=0.5, report=_print_now)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=some_of(_PARTS), default=_PARTS, metavar="A,B")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each layout")
    parser.add_argument("--out", type=Path, default=None, help="also write the JSON to this file")
    return parser.parse_args()


def _print_now(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
