"""The control plane with the packages of its image only: an import of any other one fails.

    python control_plane_alone.py control-plane.txt STATE_DIRECTORY

imports every module of the service and the API, then runs `shoal serve` for a Ray cluster that does not answer. Run by
tests/unit/deploy/test_control_plane_packages.py.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from types import ModuleType

_NAMES = str.maketrans("_.", "--")


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
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def main(listed: str, state_directory: str) -> None:
    lines = [line for line in Path(listed).read_text("utf-8").splitlines() if not line.startswith("#")]
    names = {line.partition("==")[0].lower().translate(_NAMES) for line in lines}
    vendored = {path.name for path in Path(str(distribution("ray").locate_file("ray/thirdparty_files"))).iterdir()}
    owners = {module: found for module, found in packages_distributions().items() if module not in vendored}
    sys.meta_path.insert(0, Missing({*names, "shoal"}, owners))

    import shoal_api
    import shoal_service
    from shoal_api.cli.main import build_app

    import_all(shoal_service)
    import_all(shoal_api)
    options = ["--port=0", f"--state-dir={state_directory}", "--ray-address=127.0.0.1:1"]
    build_app()(["serve", *options], prog_name="shoal")


if __name__ == "__main__":
    main(*sys.argv[1:])
