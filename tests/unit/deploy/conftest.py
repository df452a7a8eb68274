"""The files of deploy/, parsed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


@pytest.fixture(scope="session")
def manifests() -> list[dict[str, Any]]:
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    found = [document for file in files for document in yaml.safe_load_all(file.read_text("utf-8"))]
    return [document for document in found if document["kind"] != "Kustomization"]


@pytest.fixture(scope="session")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text("utf-8"))
    return found


@pytest.fixture(scope="session")
def pods(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The specs of all pods, by name."""
    [cluster] = [one for one in manifests if one["kind"] == "RayCluster"]
    found = {one["metadata"]["name"]: one["spec"]["template"] for one in manifests if one["kind"] == "Deployment"}
    found["head"] = cluster["spec"]["headGroupSpec"]["template"]
    found |= {group["groupName"]: group["template"] for group in cluster["spec"]["workerGroupSpecs"]}
    return {name: template["spec"] for name, template in found.items()}


@pytest.fixture(scope="session")
def routes() -> set[str]:
    """The paths of the control plane, of its committed OpenAPI document."""
    document = DEPLOY.parent / "docs" / "reference" / "openapi.json"
    return set(json.loads(document.read_text("utf-8"))["paths"])


@pytest.fixture(scope="session")
def run_program() -> Callable[..., None]:
    """Runs a program of this environment; it must succeed."""

    def run(name: str, *arguments: str) -> None:
        program = Path(sys.executable).parent / name
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"

    return run
