"""The peers on the published traces have the mean completion times that another, independent simulator found."""

from pathlib import Path

import pytest

from schedulers import POLICIES
from shoal_service.simulator.engine import Costs, Market
from shoal_service.simulator.metrics import measure
from shoal_service.simulator.traces import Capacity, read_capacity, read_trace

TRACES = Path(__file__).resolve().parents[5] / "shared" / "traces"
MEANS_H = {
    "first-come": (2.50, 6.47),
    "fifo-gang": (1.83, 3.87),
    "srtf-gang": (0.352, 0.395),
    "max-min": (0.286, 0.352),
    "optimus": (0.319, 0.485),
    "elastic-srpt": (0.275, 0.319),
}
"""philly-1 and saturn-1 on 32 workers, at 1 s a move."""
TOLERANCES = {"optimus": 0.03}
"""Optimus has variants; for the others the tolerance is 1 %."""
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the published traces are not in {TRACES}")


@pytest.mark.parametrize("name", sorted(MEANS_H))
@pytest.mark.parametrize(("trace", "column"), [("philly-1", 0), ("saturn-1", 1)])
def test_a_peer_has_the_mean_of_the_yardstick(name: str, trace: str, column: int) -> None:
    market = Market(capacity=Capacity.constant(8, 4), costs=Costs(switch_s=1, start_s=1))
    jobs = read_trace(TRACES / f"{trace}.csv").jobs
    found = measure(POLICIES[name].run(jobs, market), market)
    assert found.mean_jct_h == pytest.approx(MEANS_H[name][column], rel=TOLERANCES.get(name, 0.01))


def test_the_best_at_restart_costs_is_the_one_of_the_yardstick() -> None:
    market = Market(capacity=Capacity.constant(8, 4), costs=Costs(use_restart_s=True))
    jobs = read_trace(TRACES / "philly-1.csv").jobs
    assert measure(POLICIES["srtf-gang"].run(jobs, market), market).mean_jct_h == pytest.approx(0.440, abs=0.0005)


def test_the_published_capacity_is_read() -> None:
    capacity = read_capacity(TRACES / "spot-p2.csv", 2)
    assert max(nodes for _, nodes in capacity.steps) == 16
    assert capacity.steps[-1] == (pytest.approx(88.695 * 3600), 14)
