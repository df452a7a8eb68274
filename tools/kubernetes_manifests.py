"""Writes deploy/kubernetes/: the manifests of the Helm chart with its default values, for kustomize (`make docs`).

    python tools/kubernetes_manifests.py

The namespace and the kustomization are not made here: a chart does not make the namespace that it is installed in.
A test compares the files with what this makes. Helm itself comes as a library in a Python package.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import helm_python

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
CHART = DEPLOY / "helm" / "shoal"
FOLDER = DEPLOY / "kubernetes"
_HEADER = "# Made from deploy/helm/shoal by tools/kubernetes_manifests.py; edit that and run `make docs`.\n"


def main() -> None:
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def files() -> dict[str, str]:
    """The text of each file by its name; templates that render to nothing have none."""
    return {name: _HEADER + text for name, text in rendered({}).items()}


def rendered(values: dict[str, Any], namespace: str = "shoal") -> dict[str, str]:
    """The manifests with these values, by the name of their template. Raises helm_python's errors, in Helm's words."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        found = chart.render(values, name="shoal", namespace=namespace)
    texts = {Path(name).name: _tidy(text) for name, text in found.items()}
    return {name: text for name, text in sorted(texts.items()) if text}


def _tidy(text: str) -> str:
    """Removes the empty lines that directives leave, and a separator before the first document."""
    return re.sub(r"\A---\n", "", re.sub(r"(?m)^[ ]*\n", "", text + "\n"))


if __name__ == "__main__":
    main()
