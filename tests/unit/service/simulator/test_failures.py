"""Rates of failures: the file, and what is drawn from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_service.simulator.failures import RatesError, Takes, draw_failures, parse_rates

EXAMPLE = Path(__file__).parents[4] / "examples" / "failure-rates.yaml"


def test_the_example_has_the_interruptions_of_llama_3() -> None:
    causes = parse_rates(yaml.safe_load(EXAMPLE.read_text()), EXAMPLE.name)
    rate = sum(cause.find_rate(16_384, 2_048) for cause in causes)
    assert rate * 54 * 86400 == pytest.approx(419, abs=1)


def test_failures_come_at_the_rates_in_the_order_of_time() -> None:
    document = {
        "gpu": {"per_gpu_day": 0.01, "takes": "gpu", "repair_h": 1},
        "host": {"per_node_day": 0.02, "takes": "node", "buddy_lost": 0.25},
        "storage": {"per_day": 2, "takes": "storage"},
    }
    failures = draw_failures(parse_rates(document, "x"), gpus=800, nodes=100, days=200, seed=3)
    counts = {name: [f for f in failures if f.cause.name == name] for name in document}
    assert len(counts["gpu"]) == pytest.approx(1600, rel=0.1)
    assert len(counts["host"]) == pytest.approx(400, rel=0.2)
    assert len(counts["storage"]) == pytest.approx(400, rel=0.2)
    assert sum(f.takes_buddy for f in counts["host"]) == pytest.approx(100, rel=0.3)
    assert [f.at for f in failures] == sorted(f.at for f in failures)
    assert failures == draw_failures(parse_rates(document, "x"), gpus=800, nodes=100, days=200, seed=3)
    assert failures != draw_failures(parse_rates(document, "x"), gpus=800, nodes=100, days=200, seed=4)


def test_another_cause_leaves_the_others_as_they_are() -> None:
    one = {"gpu": {"per_day": 5, "takes": "gpu"}}
    two = one | {"host": {"per_day": 5, "takes": "node"}}
    first, second = (draw_failures(parse_rates(d, "x"), gpus=8, nodes=1, days=9, seed=0) for d in (one, two))
    assert [f for f in second if f.cause.takes is Takes.GPU] == first


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "must have one key for each cause"),
        ({"a": 3}, "cause a: 3 is not a mapping"),
        ({"a": {"takes": "gpu", "rate": 1}}, "the setting 'rate' is unknown"),
        ({"a": {"takes": "disk", "per_day": 1}}, "takes is 'disk' and must be one of process, gpu"),
        ({"a": {"takes": "gpu"}}, "set exactly one of per_gpu_day"),
        ({"a": {"takes": "gpu", "per_day": 1, "per_gpu_day": 1}}, "set exactly one of per_gpu_day"),
        ({"a": {"takes": "gpu", "per_day": -1}}, "per_day is -1 and must be a number, 0 or more"),
        ({"a": {"takes": "gpu", "per_day": "often"}}, "per_day is 'often'"),
        ({"a": {"takes": "node", "per_day": 1, "buddy_lost": 2}}, "buddy_lost is 2 and must be at most 1"),
        ({"a": {"takes": "slow", "per_day": 1}}, "needs a slowdown above 1"),
    ],
)
def test_a_file_that_cannot_be_used_names_the_cause_and_the_setting(document: Any, message: str) -> None:
    with pytest.raises(RatesError, match=message):
        parse_rates(document, "rates.yaml")
