"""The page about security has the table of permissions as the code has it, and names every limit."""

from docs_pages import DOCS, with_permissions
from kit.reach import table
from shoal_service.core.access import Permission
from shoal_service.settings import Settings

PAGE = DOCS / "security.md"


def test_the_table_of_permissions_is_up_to_date() -> None:
    page = PAGE.read_text("utf-8")
    assert with_permissions(page) == page
    assert all(f"| `{permission}` |" in page for permission in Permission)


def test_every_limit_is_named() -> None:
    page = PAGE.read_text("utf-8")
    limits = [name for name in Settings.model_fields if name.startswith("limit_")]
    assert len(limits) == 8 and all(f"`SHOAL_{name.upper()}`" in page for name in limits)


def test_the_table_of_what_job_code_reaches_is_the_one_that_a_hostile_task_is_compared_with() -> None:
    assert table() in PAGE.read_text("utf-8")
