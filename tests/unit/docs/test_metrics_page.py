"""docs/reference/metrics.md is what tools/docs_pages.py makes of the declared metrics."""

from pathlib import Path
from types import ModuleType

from shoal_service.core.goodput import Category
from shoal_service.telemetry.catalogue import ALL

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_committed_page_is_up_to_date(generate: ModuleType) -> None:
    assert (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8") == generate.metrics_page(), "run `make docs`"


def test_every_metric_is_listed() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"| `{metric.name}` |" in page for metric in ALL)


def test_the_page_of_the_rest_api_explains_every_category() -> None:
    page = (DOCS / "reference" / "rest-api.md").read_text(encoding="utf-8")
    assert all(f"| `{category}` |" in page for category in Category)
