"""When the whole state of a model fits on each worker."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.engine.model.whole_state import bytes_needed, decide

GIB = 1 << 30


@pytest.mark.parametrize(
    ("texts", "refused"),
    [
        ([f"a {4 * GIB} {8 * GIB} 0"], ""),
        ([f"a {4 * GIB + 1} {8 * GIB} 0"], "1 on a need 4.00 GiB, and 50% of 8.00 GiB may be used"),
        ([f"a {2 * GIB} {8 * GIB} 0", f"b {4 * GIB} {8 * GIB} 0", f"a {2 * GIB} {9 * GIB} 0"], ""),
        ([f"a {3 * GIB} {9 * GIB} 0", f"b {GIB} {8 * GIB} 0", f"a {3 * GIB} {8 * GIB} 0"], "2 on a need 6.00 GiB"),
        ([f"a 0 {GIB} 0", f"b 0 {GIB} 0", f"a {GIB // 2} {GIB} 0"], ""),
    ],
)
def test_the_workers_of_a_host_share_half_of_what_is_left_there(texts: list[str], refused: str) -> None:
    found = decide(texts)
    assert refused in found and bool(found) == bool(refused)


def test_each_worker_of_a_host_may_use_half_of_its_own_limit() -> None:
    texts = [f"a {GIB} {8 * GIB} 0", f"a {GIB} {8 * GIB} 0"]
    assert decide(texts, 2 * GIB) == ""
    assert "2 on a need 2.00 GiB, and 50% of 3.00 GiB may be used" in decide(texts, 3 * GIB // 2)


def test_memory_that_workers_have_touched_for_their_tensors_is_theirs() -> None:
    texts = [f"a {2 * GIB} {4 * GIB} {2 * GIB}", f"a {2 * GIB} {4 * GIB} {2 * GIB}"]
    assert decide(texts) == ""
    assert "90% of 4.00 GiB" in decide([f"a {4 * GIB} {4 * GIB} 0"], usable=0.9)


@pytest.mark.parametrize(("snapshots", "per_weight"), [(True, 4 * (3 * 3 + 2)), (False, 4 * (3 + 2))])
def test_frozen_parameters_need_no_gradient_and_no_moments(snapshots: bool, per_weight: int) -> None:
    model: Any = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    spec = parse_spec({"task": "mine:Task", "stop": {"steps": 1}, "snapshot": {"enabled": snapshots}})
    assert bytes_needed(model, spec) == 200 * per_weight
    model[0].requires_grad_(False)
    assert bytes_needed(model, spec) == 100 * per_weight + 100 * 4 * (3 if snapshots else 1)
