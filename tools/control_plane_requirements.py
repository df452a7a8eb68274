"""Writes deploy/docker/control-plane.txt: what the image of the control plane installs (`make docs`).

It is everything that Shoal needs, and what that needs, without what only the cluster and its gateway use: torch, whose
packages are gigabytes, Ray, and what nothing but these two asks for. The versions are those of constraints.txt. pip
cannot leave out a dependency, so the image installs this list with `--no-deps`
(docs/decisions/0041-deployment-files.md).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "deploy" / "docker" / "control-plane.txt"
_EXTRAS = ("postgres", "s3")
_INSTEAD = {"torch": (), "ray": ("pyarrow",)}
"""pyarrow writes Parquet files of series; it comes with `ray[train]`."""
_HEADER = """\
# What the image of the control plane installs, with --no-deps: all that it needs, without torch and Ray.
# Made by tools/control_plane_requirements.py from pyproject.toml and constraints.txt; run `make docs`.
"""


def text() -> str:
    versions = dict(_pinned())
    return _HEADER + "".join(f"{name}=={versions[name]}\n" for name in sorted(closure()))


def closure() -> set[str]:
    """Canonical names of all packages but Shoal itself."""
    waiting = [Requirement(line) for line in _roots()]
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        try:
            requires = distribution(wanted.name).requires or ()
        except PackageNotFoundError:
            raise SystemExit(f"{wanted.name} is not installed: run `make setup` first") from None
        found.add(name)
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needed = (Requirement(line) for line in requires)
            waiting += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


def _roots() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *(line for extra in _EXTRAS for line in extras[extra])]:
        yield from _INSTEAD.get(canonicalize_name(Requirement(line).name), (line,))


def _pinned() -> Iterator[tuple[str, str]]:
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if match := re.fullmatch(r"([\w.-]+)==(\S+)", line):
            yield canonicalize_name(match[1]), match[2]


def main() -> None:
    PAGE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
