"""The JavaScript libraries of the pages, which arrive as Python packages (decision 0031). A library has its version in
its address, so that the browser keeps it for a year. Called by `page_files.py` and `routes/pages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Library:
    """A file of an installed Python package."""

    package: str
    distribution: str
    path: str
    media_type: str

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def url(self) -> str:
        return f"/static/vendor/{version(self.distribution)}/{self.name}"

    def read(self) -> bytes:
        """Reads the file without importing the package."""
        spec = find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations, f"{self.distribution} is a dependency of Shoal"
        return Path(spec.submodule_search_locations[0], self.path).read_bytes()


LIBRARIES = (
    Library("plotly", "plotly", "package_data/plotly.min.js", "text/javascript"),
    Library("fastapi_offline", "fastapi-offline", "static/swagger-ui-bundle.js", "text/javascript"),
    Library("fastapi_offline", "fastapi-offline", "static/swagger-ui.css", "text/css"),
)
