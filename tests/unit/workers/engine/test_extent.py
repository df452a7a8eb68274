from __future__ import annotations

import pytest

from shoal_workers.contract.spec import StopSpec
from shoal_workers.engine.schedule import is_due, total_steps


@pytest.mark.parametrize(
    ("stop", "steps"),
    [
        ({"steps": 7}, 7),
        ({"tokens": 1}, 1),
        ({"tokens": 80}, 1),
        ({"tokens": 81}, 2),
        ({"tokens": 80 * 10**13 + 1}, 10**13 + 1),
        ({"epochs": 1}, 3),
        ({"epochs": 0.8}, 2),
        ({"epochs": 0.4}, 1),
        ({"epochs": 2}, 5),
        ({"epochs": 1e-9}, 1),
    ],
)
def test_tokens_and_epochs_are_rounded_up_to_whole_steps(stop: dict[str, float], steps: int) -> None:
    spec = StopSpec.model_validate(stop)
    assert total_steps(spec, global_size=10, num_samples=25, tokens_per_sample=8) == steps


def test_a_tenth_of_thirty_samples_is_three_samples() -> None:
    assert total_steps(StopSpec(epochs=0.1), global_size=3, num_samples=30, tokens_per_sample=1) == 1


def test_a_thing_is_due_after_every_so_many_steps_or_never() -> None:
    assert [step for step in range(1, 10) if is_due(step, 3)] == [3, 6, 9]
    assert not is_due(3, None)
