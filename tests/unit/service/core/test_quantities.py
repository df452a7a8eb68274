import pytest

from shoal_service.core.quantities import count_text, duration_text, size_text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "?"), (-1, "?"), (0.03, "30 ms"), (1.26, "1.3 s"), (42, "42 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_are_rounded_for_people(value: float | None, text: str) -> None:
    assert duration_text(value) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_not_a_duration(value: float) -> None:
    assert duration_text(value) == "?"


def test_sizes_have_binary_units() -> None:
    assert [size_text(n) for n in (10, 2048, 5 * 2**20)] == ["10 B", "2.0 KiB", "5.0 MiB"]


def test_one_of_a_kind_has_no_plural() -> None:
    assert [count_text(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
