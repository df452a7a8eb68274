"""What `shoal plan` says about the model at the top of its page."""

from typing import Any

import pytest
from rich.text import Text

from shoal_api.cli.render.plan import plan_page
from shoal_service.control.planning import PlanRequest, answer
from shoal_service.planner.gpus import PROFILES

MODEL = {"dim": 64, "num_layers": 4, "num_heads": 4, "seq_len": 32}
FROZEN = {"groups": [{"match": "blocks.*", "frozen": True}]}


@pytest.mark.parametrize(
    ("optimizer", "expected", "absent"),
    [
        ({}, "0.00023 B parameters, 8 micro-batches", "trained"),
        ({"name": "sgd"}, "0 bytes of optimizer state for each", "trained"),
        ({"name": "lion", "ema_decay": 0.99, **FROZEN}, "M of them trained, 8 micro-batches", "bytes of optimizer"),
        ({"name": "muon"}, "bytes of optimizer state for each", "trained"),
    ],
)
def test_the_head_says_what_is_trained_and_what_the_optimizer_keeps(
    optimizer: dict[str, Any], expected: str, absent: str
) -> None:
    spec = {"stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}, "model": MODEL, "optimizer": optimizer}
    head = plan_page(answer(PlanRequest(spec=spec, workers=2), PROFILES))[0]
    assert isinstance(head, Text)
    assert expected in head.plain
    assert absent not in head.plain
