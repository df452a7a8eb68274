"""docs/reference/events.md is what tools/docs_pages.py makes of the catalogue of events."""

import importlib.util
from pathlib import Path

from shoal_service.core.events.catalogue import CATALOGUE

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_committed_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("shoal_docs_pages", DOCS.parent / "tools" / "docs_pages.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (DOCS / "reference" / "events.md").read_text(encoding="utf-8") == generator.events_page(), "run `make docs`"


def test_every_event_is_listed() -> None:
    page = (DOCS / "reference" / "events.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in CATALOGUE)
