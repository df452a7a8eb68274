"""Puts the simulation of examples/trace.csv into docs/scheduling.md, as a table and as a picture: `make docs`.

Both are what tools/replay.py prints and draws. They change with the policy, on purpose or not: look at the
difference.
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from schedule_picture import Panel, draw, title
from schedulers import POLICIES
from shoal_api.cli.render.plan import Simulated, render_simulation
from shoal_service.simulator.engine import Market
from shoal_service.simulator.metrics import measure
from shoal_service.simulator.traces import Capacity, read_trace

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scheduling.md"
_PICTURE = ROOT / "docs" / "images" / "schedule.svg"
_BEGIN = "<!-- simulated: made by tools/simulation_page.py from examples/trace.csv; run `make docs` -->"
_END = "<!-- end -->"
_DRAWN = ("first-come", "srtf-gang", "max-min", "shoal")
_WIDTH = 110
_NUM_HEAD_LINES = 2


def main() -> None:
    trace = read_trace(ROOT / "examples" / "trace.csv")
    market = Market(capacity=Capacity.constant(4, 4))
    runs = {name: policy.run(trace.jobs, market, use_rules=True) for name, policy in POLICIES.items()}
    found = [Simulated(name, run, measure(run, market)) for name, run in runs.items()]
    console = Console(width=_WIDTH, file=io.StringIO(), record=True)
    for part in render_simulation(trace, market, found, restart_costs=False)[:_NUM_HEAD_LINES]:
        console.print(part)
    shown = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), shown), encoding="utf-8")
    panels = [Panel(title(one), one.run) for one in found if one.policy in _DRAWN]
    panels.sort(key=lambda panel: _DRAWN.index(panel.title.partition(":")[0]))
    _PICTURE.write_text(draw(panels, market.capacity), encoding="utf-8")


def with_table(page: str, shown: str) -> str:
    """The page with a new table."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END, 1)
    return f"{before}{_BEGIN}\n```\n{shown}\n```\n{_END}{after}"


if __name__ == "__main__":
    main()
