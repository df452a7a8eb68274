"""The control plane with the packages of its image only: an import of any other one fails.

    python control_plane_alone.py control-plane.txt STATE_DIRECTORY

imports every module of the service and the API that the control plane may use, then runs `shoal serve` for a cluster
that joins. Run by tests/unit/deploy/test_control_plane_packages.py.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

_NAMES = str.maketrans("_.", "--")
_OF_THE_CLUSTER = ("shoal_service.cluster", "shoal_service.gateway", "shoal_service.supervisor")
"""Packages with modules that speak Ray. What the control plane uses of them is imported by those that use it."""


class Missing:
    """A finder of modules that are not in the image."""

    def __init__(self, installed: set[str], owners: Mapping[str, list[str]]) -> None:
        self._installed = installed
        self._owners = owners

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        owners = {owner.lower().translate(_NAMES) for owner in self._owners.get(name.partition(".")[0], ())}
        if owners and not owners & self._installed:
            raise ModuleNotFoundError(f"{name} of {', '.join(owners)} is not in the image", name=name)


def import_all(package: ModuleType) -> None:
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.name not in _OF_THE_CLUSTER:
            found = importlib.import_module(module.name)
            if module.ispkg:
                import_all(found)


def main(listed: str, state_directory: str) -> None:
    lines = [line for line in Path(listed).read_text("utf-8").splitlines() if not line.startswith("#")]
    names = {line.partition("==")[0].lower().translate(_NAMES) for line in lines}
    sys.meta_path.insert(0, Missing({*names, "shoal"}, packages_distributions()))

    import shoal_api
    import shoal_service
    from shoal_api.cli.main import build_app

    import_all(shoal_service)
    import_all(shoal_api)
    build_app()(["serve", "--port=0", f"--state-dir={state_directory}", "--cluster=default"], prog_name="shoal")


if __name__ == "__main__":
    main(*sys.argv[1:])
