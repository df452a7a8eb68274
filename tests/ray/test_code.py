"""The user's modules and Shoal's do not conflict in an installation from the wheel."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

from shoal_api.client import Client
from shoal_workers.contract.job import JobState
from shoal_workers.version import VERSION

SHADOWING = Path(__file__).parents[1] / "kit" / "shadowing"


def test_the_server_runs_from_the_built_wheel(wheel_python: Path, tmp_path: Path) -> None:
    program = "import shoal_api, shoal_service, shoal_workers as w; print(shoal_api.__file__, shoal_service.__file__)"
    shown = subprocess.run(
        [wheel_python, "-I", "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    site_packages = wheel_python.parent.parent / "lib"
    assert all(path.startswith(str(site_packages)) for path in shown.stdout.split())


def test_the_wheel_has_the_license_the_version_and_the_console_script(wheel_python: Path, tmp_path: Path) -> None:
    """`shoal --version` and the metadata come from one place (shoal_workers/version.py)."""
    program = (
        "import json; from importlib.metadata import distribution; d = distribution('shoal');"
        "print(json.dumps([d.version, d.metadata['License-Expression'], d.metadata['Description-Content-Type'],"
        "d.entry_points['shoal'].value, [str(f) for f in d.files if f.name == 'LICENSE'],"
        "d.metadata['Description'][:7]]))"
    )
    shown = subprocess.run(
        [wheel_python, "-I", "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert json.loads(shown.stdout) == [
        VERSION,
        "Apache-2.0",
        "text/markdown",
        "shoal_api.cli.entry:main",
        [f"shoal-{VERSION}.dist-info/licenses/LICENSE"],
        "# Shoal",
    ]
    said = subprocess.run([wheel_python, "-m", "shoal_api.cli.main", "--version"], capture_output=True, text=True)
    assert said.stdout == f"shoal {VERSION}\n"


def test_the_wheel_is_built_from_an_sdist_that_has_what_a_deployment_needs(wheel_python: Path) -> None:
    [sdist] = wheel_python.parents[2].glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "deploy/Dockerfile", "docs/install.md"} <= names
    assert not [name for name in names if name.startswith(("deploy/compose/secrets/", "tests/", "build/"))]


def test_a_user_directory_with_packages_named_like_our_source_roots_works(client: Client, wheel_python: Path) -> None:
    job = client.submit(
        {
            "name": "shadowing",
            "task": "trainer:Task",
            "code": {"working_dir": str(SHADOWING)},
            "batch": {"global_size": 4, "micro_size": 2},
            "stop": {"steps": 3},
        }
    )
    ended = client.wait(job.id, timeout_s=120)
    assert ended.status.state is JobState.SUCCEEDED, ended.status
    found = dict(line.text.split(" = ") for line in client.logs(job.id) if " = " in line.text)
    for name in ("api", "service", "workers"):
        assert Path(found[name]).parent.name == name
        assert f"/{job.id}-" in found[name], "the job's copy of the user's directory"
    assert found["shoal_workers"].startswith(str(wheel_python.parent.parent))
