"""The picture of small runs, worked out by hand."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from kit.market_traces import market, scripted, trace_job
from schedule_picture import Panel, draw, title
from shoal_api.cli.render.plan import Simulated
from shoal_service.simulator.engine import simulate
from shoal_service.simulator.metrics import measure
from shoal_service.simulator.traces import Capacity


def test_bands_are_stacked_and_as_high_as_their_workers() -> None:
    """880 pixels for 40 s, 170 for 4 workers: `a` has 4 workers for 10 s, then 2; `b` has 2 above it for 20 s."""
    jobs = [trace_job("a", work=100), trace_job("b", submit_s=10, work=40)]
    run = simulate(jobs, scripted({0: {"a": 4}, 10: {"a": 2, "b": 2}}), market(4))
    assert run.ended_at == 40
    paths = re.findall(r'<path d="([^"]*)" fill="hsl', draw([Panel("p", run)], Capacity.constant(4, 1)))
    assert paths == [
        "M46 26.0h220v170.0h-220zM266 111.0h660v85.0h-660z",
        "M266 26.0h440v85.0h-440z",
    ]


def test_names_are_escaped_and_long_runs_stay_small() -> None:
    jobs = [trace_job(f"<{number}>", submit_s=number, work=4, workers=(1, 1)) for number in range(500)]
    run = simulate(jobs, scripted({number: {f"<{number}>": 1} for number in range(500)}), market(8))
    svg = draw([Panel("a & b", run)], Capacity.constant(8, 1))
    assert "a &amp; b" in svg and "<title>&lt;7&gt;</title>" in svg
    assert len(svg) < 200_000


def test_nothing_that_ran_is_an_empty_panel() -> None:
    run = simulate([trace_job("a")], lambda state, now: [], market(4))
    assert "hsl" not in draw([Panel("p", run)], Capacity.constant(4, 1))


def test_the_title_has_the_figures_of_the_run() -> None:
    of_one = market(4)
    run = simulate([trace_job("a", work=100)], scripted({0: {"a": 4}}), of_one)
    drawn = ElementTree.fromstring(
        draw([Panel(title(Simulated("p", run, measure(run, of_one))), run)], of_one.capacity)
    )
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "p: mean completion time 25 s, 0 moves, 0 preemptions" in texts
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}title"))) == 1
