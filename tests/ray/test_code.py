"""The user's modules and Shoal's do not conflict in an installation from the wheel."""

from __future__ import annotations

import subprocess
from pathlib import Path

from shoal_api.client import Client
from shoal_workers.contract.job import JobState

SHADOWING = Path(__file__).parents[1] / "kit" / "shadowing"


def test_the_server_runs_from_the_built_wheel(wheel_python: Path, tmp_path: Path) -> None:
    program = "import shoal_api, shoal_service, shoal_workers as w; print(shoal_api.__file__, shoal_service.__file__)"
    shown = subprocess.run(
        [wheel_python, "-I", "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    site_packages = wheel_python.parent.parent / "lib"
    assert all(path.startswith(str(site_packages)) for path in shown.stdout.split())


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
        assert "runtime_resources" in found[name], "the copy of the user's directory that Ray unpacked"
    assert found["shoal_workers"].startswith(str(wheel_python.parent.parent))
