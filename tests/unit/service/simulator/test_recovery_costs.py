"""Costs of a recovery: what was measured is met, and how they grow."""

from __future__ import annotations

import pytest

from shoal_service.simulator.recovery_costs import RecoveryCosts

COSTS = RecoveryCosts()


def test_what_was_measured_and_published_is_met_at_its_size() -> None:
    connect_s = COSTS.connect_96k_s * 4096 / 96_000
    supervisor_s = COSTS.find_leave_s(4096) - COSTS.leave_s + COSTS.find_form_s(4096, 4096) - connect_s
    assert supervisor_s == pytest.approx(1.06 + 2 * 4096 * COSTS.order_s), "an interrupt and a run for each rank"
    assert COSTS.find_leave_s(64) < 0.1  # of 0.226 s with real Ray, measured/scale.md, with the detection
    assert COSTS.find_form_s(96_000, 96_000) == pytest.approx(265 + 96_000 * COSTS.order_s, rel=0.07)
    assert COSTS.find_form_s(96_000, 960) == pytest.approx(COSTS.find_form_s(96_000, 96_000) - 0.99 * 265)


def test_a_restore_takes_the_bytes_of_a_rank_or_the_whole_state() -> None:
    params = 405e9
    memory_s, storage_s = (COSTS.find_restore_s(16_384, params, is_durable=durable) for durable in (False, True))
    rank_bytes = 16 * params / 16_384
    assert memory_s == pytest.approx(COSTS.build_s + rank_bytes / 25e9 + rank_bytes / 55e9)
    assert storage_s == pytest.approx(COSTS.build_s + 16 * params / 2e12 + rank_bytes / 55e9)


@pytest.mark.parametrize("params", [1e9, 7e9, 70e9, 405e9])
@pytest.mark.parametrize("gpus", [64, 1024, 16_384])
def test_snapshots_keep_to_their_budget_and_are_no_rarer_than_it_requires(gpus: int, params: float) -> None:
    copies, sends, share = COSTS.find_snapshot_pace(gpus, params, 5.0, 0.01)
    assert 1 <= copies <= sends and sends % copies == 0
    assert share <= 0.01 + 1e-9
    if sends > 2 * copies:
        assert share > 0.005
