from __future__ import annotations

from shoal_api.demo.plot import plot_losses

CURVE = {step: 5.0 - step / 10 for step in range(1, 41)}


def test_equal_runs_are_one_curve() -> None:
    text = "\n".join(plot_losses(CURVE, CURVE, marks={}, width=40, height=10))
    assert "●" in text
    assert "▲" not in text
    assert "▽" not in text


def test_unequal_runs_show_the_points_of_each_run() -> None:
    other = {step: loss + (1.0 if step > 20 else 0.0) for step, loss in CURVE.items()}
    text = "\n".join(plot_losses(CURVE, other, marks={}, width=40, height=10))
    assert all(glyph in text for glyph in "●▲▽")


def test_marks_are_drawn_on_the_axis() -> None:
    assert plot_losses(CURVE, CURVE, marks={20: "✗", 99: "!"}, width=40, height=10)[-2].count("✗") == 1


def test_without_points_there_are_no_lines() -> None:
    assert plot_losses({}, {1: float("nan")}, marks={}, width=40, height=10) == []
    assert plot_losses({1: 2.0}, {}, marks={}, width=40, height=10)
