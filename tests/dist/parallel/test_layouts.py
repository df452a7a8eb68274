"""Every legal layout computes what one process computes: losses, gradient norms, validation. See layout_cases.py."""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds import layout_cases

_SAMPLE = layout_cases.sample()


def _cells() -> list[Any]:
    """The sample first, the rest for `make test-all`; each in an order that changes processes seldom."""
    sampled = set(_SAMPLE)
    others = [case for case in layout_cases.all_cases() if case not in sampled]
    return [pytest.param(case, id=case.name) for case in sorted(_SAMPLE, key=_processes)] + [
        pytest.param(case, id=case.name, marks=pytest.mark.matrix) for case in sorted(others, key=_processes)
    ]


def _processes(case: Any) -> tuple[str, str, int, int]:
    return case.precision, case.model, case.num_layers, case.global_size


@pytest.mark.parametrize("case", _cells())
def test_a_layout_trains_as_one_process_does(case: Any, pool_of: Any, plain_run: Any, text: str) -> None:
    plain = plain_run(case.spec(text))
    seen = pool_of(case.spec(text, precision=case.precision)).train(case.layout)
    losses, norms = (1e-5, 1e-5) if case.precision == "fp32" else (2e-2, None)
    assert seen.losses == pytest.approx(plain.losses, abs=losses)
    assert seen.validation == pytest.approx(plain.validation, abs=losses)
    if norms is not None:
        assert seen.norms == pytest.approx(plain.norms, abs=norms, rel=norms)


def test_every_axis_and_choice_is_in_the_matrix() -> None:
    """The enumeration itself: an axis that legality came to forbid would vanish silently."""
    cases = layout_cases.all_cases()
    for model in ("dense", "experts"):
        layouts = [case.layout for case in cases if case.model == model]
        for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
            assert {1, 2, 3, 4, 8} <= {getattr(layout, axis) for layout in layouts}, axis
        assert {1, 2, 3, 4} <= {layout.pp for layout in layouts}, model
        for choice, num in (("schedule", 5), ("shard", 4), ("context", 2), ("recompute", 3)):
            assert len({getattr(layout, choice) for layout in layouts}) == num, choice
    assert {1, 2, 3, 4, 8} <= {case.layout.ep for case in cases}
    assert {4, 8} == {case.layout.pp for case in cases if case.model == "deep"}
