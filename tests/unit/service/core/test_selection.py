"""Conditions on labels: the four forms, what each one finds, and what is refused."""

import pytest

from shoal_service.core.where.language import InvalidSelector, LabelSelector, search_words


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("sweep", LabelSelector("sweep")),
        (" sweep ", LabelSelector("sweep")),
        ("!sweep", LabelSelector("sweep", negated=True)),
        ("sweep=lr", LabelSelector("sweep", "lr")),
        ("sweep!=lr", LabelSelector("sweep", "lr", negated=True)),
        ("empty=", LabelSelector("empty", "")),
        ("empty!=", LabelSelector("empty", "", negated=True)),
    ],
)
def test_a_selector_has_one_of_four_forms(text: str, selector: LabelSelector) -> None:
    assert LabelSelector.parse(text) == selector


def test_a_value_may_have_signs_of_its_own() -> None:
    assert LabelSelector.parse("note=a=b!=c") == LabelSelector("note", "a=b!=c")


@pytest.mark.parametrize("text", ["", "!", "=3", "!=3", "a b=3", "x" * 64, "x=" + "y" * 256, "!!x", "!x=3"])
def test_other_texts_are_refused_with_the_forms_that_there_are(text: str) -> None:
    with pytest.raises(InvalidSelector, match="NAME!=VALUE"):
        LabelSelector.parse(text)


def test_a_search_has_words() -> None:
    assert search_words("  byte   lr=3e-4 ") == ("byte", "lr=3e-4")
    assert len(search_words("a " * 100)) == 8
