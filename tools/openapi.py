"""Writes docs/reference/openapi.json, and the table of problems in docs/reference/rest-api.md (`make docs`). A test
compares both with what the service returns."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from shoal_api.http.app import create_app
from shoal_service.fleet_views import ClusterView
from shoal_service.problems import problem_kinds
from shoal_service.store import Store
from shoal_workers.version import VERSION

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
_BEGIN = "<!-- problems: made by tools/openapi.py from the classes of errors; run `make docs` -->\n"
_END = "<!-- end of problems -->"


class NoCluster:
    def snapshot(self) -> ClusterView:
        raise AssertionError("the document does not need the cluster")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(f"sqlite:///{folder}/shoal.db")
        app = create_app(store=store, cluster=NoCluster(), scrape=lambda accept: (b"", "text/plain"), version=VERSION)
        text = json.dumps(app.openapi(), indent=1, sort_keys=True)
        store.close()
    (REFERENCE / "openapi.json").write_text(text + "\n")
    page = REFERENCE / "rest-api.md"
    page.write_text(with_problems(page.read_text()))


def with_problems(page: str) -> str:
    """Return docs/reference/rest-api.md with a new table of problems."""
    before, rest = page.split(_BEGIN)
    kinds = sorted(problem_kinds().values(), key=lambda kind: kind.status)
    rows = "".join(f"| {kind.status} | `{kind.code}` | {kind.meaning} |\n" for kind in kinds)
    return f"{before}{_BEGIN}| status | `code` | |\n|---|---|---|\n{rows}\n{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    main()
