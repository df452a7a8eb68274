"""Writes docs/reference/openapi.json, compared by a test with what the service returns (`make docs`)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from shoal_api.http.app import create_app
from shoal_service.fleet_views import ClusterView
from shoal_service.store import Store
from shoal_workers.version import VERSION


class NoCluster:
    def snapshot(self) -> ClusterView:
        raise AssertionError("the document does not need the cluster")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(f"sqlite:///{folder}/shoal.db")
        app = create_app(store=store, cluster=NoCluster(), scrape=lambda accept: (b"", "text/plain"), version=VERSION)
        text = json.dumps(app.openapi(), indent=1, sort_keys=True)
        store.close()
    (Path(__file__).parents[1] / "docs" / "reference" / "openapi.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
