"""A job changes its parallel layout during training, after a death of a worker and on request.

The losses are those of one process without faults, and surviving workers keep their processes.
"""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds.tiny_jobs import STACKED
from shoal_api.client import Client


@pytest.fixture
def reference(submit: Any) -> Any:
    """Losses by step of one worker."""
    run = submit(workers=1, steps=24, **STACKED)
    run.finish()
    return run.losses()


def assert_same(run: Any, reference: dict[int, float]) -> None:
    losses = run.losses()
    assert list(losses) == list(range(1, run.job.spec.stop.steps + 1))
    assert losses == pytest.approx({step: reference[step] for step in losses}, rel=1e-5, abs=1e-6)


def layouts(run: Any) -> list[str]:
    return [event.data["layout"] for event in run.events("generation.formed")]


def test_after_a_death_the_others_go_on_in_another_layout_and_come_back_to_the_first(
    submit: Any, client: Client, reference: dict[int, float]
) -> None:
    run = submit(
        workers=4,
        steps=24,
        waves=[4, 5],
        parallelism={"pp": 2, "tp": 2},
        strikes=[
            {"at": "step", "rank": 0, "n": 6, "do": "hold"},
            {"at": "step", "rank": 2, "n": 7, "do": "kill"},
            {"at": "step", "rank": 0, "n": 14, "do": "hold"},
        ],
        **STACKED,
    )
    run.wait_at("step-6-0")
    before = run.pids()
    run.release("step-6-0")
    run.wait_at("step-14-0")
    run.wait_for_event("generation.switching")
    after = run.pids()
    run.release("step-14-0")
    run.finish()
    assert layouts(run) == ["pp2 x tp2", "fsdp3", "pp2 x tp2"]
    assert set(after.values()) >= {before[0], before[1], before[3]}, "the survivors live on"
    [incident] = client.incidents(run.id)
    assert (incident.from_layout, incident.to_layout) == ("pp2 x tp2", "fsdp3")
    assert incident.state_source == "memory" and incident.steps_lost is not None and incident.steps_lost <= 1
    assert_same(run, reference)
