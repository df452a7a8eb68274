"""Conditions on labels: the four forms, what each one finds, and what is refused."""

import pytest

from shoal_service.core.selection import InvalidSelector, LabelSelector, search_words

LABELS = {"sweep": "lr", "lr": "3e-4", "empty": ""}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sweep", True),
        ("depth", False),
        ("!sweep", False),
        ("!depth", True),
        ("sweep=lr", True),
        ("sweep=depth", False),
        ("sweep!=lr", False),
        ("sweep!=depth", True),
        ("depth!=3", True),
        ("empty=", True),
        ("empty!=", False),
    ],
)
def test_a_selector_finds_the_jobs_that_its_text_says(text: str, found: bool) -> None:
    assert LabelSelector.parse(text).matches(LABELS) is found


def test_a_value_may_have_signs_of_its_own() -> None:
    assert LabelSelector.parse("note=a=b!=c") == LabelSelector("note", "a=b!=c")


@pytest.mark.parametrize("text", ["", "!", "=3", "!=3", "a b=3", "x" * 64, "x=" + "y" * 256, "!!x", "!x=3"])
def test_other_texts_are_refused_with_the_forms_that_there_are(text: str) -> None:
    with pytest.raises(InvalidSelector, match="NAME!=VALUE"):
        LabelSelector.parse(text)


def test_a_search_has_words() -> None:
    assert search_words("  byte   lr=3e-4 ") == ("byte", "lr=3e-4")
    assert len(search_words("a " * 100)) == 8
