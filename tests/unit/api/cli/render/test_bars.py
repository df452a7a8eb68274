from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal_api.cli.render.bars import Part, bar, shares


@given(st.lists(st.floats(0, 1e12), max_size=12), st.integers(1, 100))
def test_shares_fill_the_width_and_every_part_is_visible_if_the_width_allows(amounts: list[float], width: int) -> None:
    blocks = shares(amounts, width)
    assert len(blocks) == len(amounts)
    assert sum(blocks) == (width if sum(amounts) > 0 else 0)
    assert all((block == 0) for block, amount in zip(blocks, amounts, strict=True) if amount == 0)
    if sum(1 for amount in amounts if amount > 0) <= width:
        assert all(block >= 1 for block, amount in zip(blocks, amounts, strict=True) if amount > 0)


def test_the_length_of_a_part_is_its_share() -> None:
    line = bar([Part("a", 3.0, "red"), Part("b", 0.0, "blue"), Part("c", 1.0, "green")], 8)
    assert line.plain == "█" * 8
    assert [(span.start, span.end, span.style) for span in line.spans if span.end > span.start] == [
        (0, 6, "red"),
        (6, 8, "green"),
    ]
