"""The table of docs/programs.md has the programs that tests run."""

from kit.worlds.small_programs import REFUSED, TRAINED
from programs_page import PAGE, with_programs


def test_the_page_has_the_rows_that_are_run() -> None:
    page = PAGE.read_text("utf-8")
    assert page == with_programs(page), "run python tools/programs_page.py"


def test_there_are_at_least_forty_programs_and_no_words_twice() -> None:
    rows = [*TRAINED, *REFUSED]
    assert len(TRAINED) >= 40
    assert len({row.words for row in rows}) == len(rows)
