"""`shoal serve --isolate` looks at its directories with the users of its processes, and names the one that is not as it
should be. With real users; the cluster that it starts is in test_hostile_task.py."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.processes.other_users import NOBODY, needs_root, open_directory, reachable_python

_LOOK = """
import json, sys
from pathlib import Path
from shoal_service.cluster.isolation import IsolationConfig, isolate
from shoal_service.problems import SettingsError
given = json.loads(sys.argv[1])
config = IsolationConfig(
    user="65534", gateway_user="64003", home=Path(given["home"]), state_dir=Path(given["state_dir"]),
    checkpoints=Path(given["checkpoints"]), secrets={"tls_key": Path(given["tls_key"])},
)
try:
    isolate(config)
    print("as it should be")
except SettingsError as error:
    print(error)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    needs_root()
    with open_directory("shoal-users-") as found:
        (found / "state").mkdir(mode=0o700)
        (found / "server.key").touch(mode=0o600)
        yield found


@pytest.fixture
def look(folder: Path, wheel_python: Path) -> Callable[..., str]:
    python = reachable_python(wheel_python, folder)

    def run(**changes: Path) -> str:
        given = {"home": "jobs", "state_dir": "state", "checkpoints": "jobs/checkpoints", "tls_key": "server.key"}
        paths = {name: str(changes.get(name, folder / path)) for name, path in given.items()}
        done = subprocess.run([python, "-c", _LOOK, json.dumps(paths)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_what_is_missing_is_made_for_the_user_of_the_workers_and_what_is_open_is_named(
    look: Callable[..., str], folder: Path
) -> None:
    assert look() == "as it should be"
    for made in (folder / "jobs", folder / "jobs" / "checkpoints"):
        assert (made.stat().st_uid, made.stat().st_mode & 0o777) == (NOBODY, 0o700)

    (folder / "server.key").chmod(0o644)
    assert f"tls_key {folder}/server.key can be read by nobody (isolate_user)" in look()
    assert "chmod go=" in look()
    (folder / "server.key").chmod(0o600)

    (folder / "state").chmod(0o711)
    assert f"state_dir {folder}/state can be read by nobody (isolate_user)" in look()
    (folder / "state").chmod(0o700)

    (folder / "roots").mkdir(mode=0o755)
    words = look(checkpoints=folder / "roots")
    assert f"checkpoint_url {folder}/roots cannot be used by nobody" in words and "chown -R nobody" in words
