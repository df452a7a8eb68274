"""The control plane runs with what its image installs: without Ray, torch, and what belongs to workers."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes.server import until
from shoal_api.client import Client
from shoal_service.core.access import Role, new_token
from shoal_workers.version import VERSION

# Servers in their own processes; `make lint` checks the imports of every room meanwhile.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
LISTED = ROOT / "deploy" / "docker" / "control-plane.txt"
PROGRAM = ROOT / "tests" / "kit" / "deploy" / "control_plane_alone.py"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server that has only the packages of the image."""
    monkeypatch.setenv("SHOAL_STATE_DIR", str(tmp_path))
    token = tmp_path / "cluster-token"
    token.write_text(new_token())
    monkeypatch.setenv("SHOAL_CLUSTER_TOKEN_FILE", str(token))
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen([sys.executable, PROGRAM, LISTED, tmp_path], stdout=output, stderr=output)

    def listening() -> re.Match[str] | None:
        assert server.poll() is None, log.read_text()
        return re.search(r"^listening on (\S+)", log.read_text(), re.M)

    try:
        yield until(listening, "the server listens")[1]
    finally:
        server.kill()
        server.wait()


def test_every_module_is_imported_and_requests_are_served(url: str, tmp_path: Path) -> None:
    with Client(url) as client:
        assert client.health().version == VERSION
        job = client.submit({"name": "fish", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 5}})
        assert [event.type for event in client.events(job.id)][:1] == ["job.created"]
        series = io.BytesIO()
        client.save_series(job.id, series, format="parquet")
        assert series.getvalue()[:4] == b"PAR1"
        [gateway] = [one for one in client.tokens() if one.role is Role.GATEWAY]
        assert gateway.cluster == "default" and gateway.id in (tmp_path / "cluster-token").read_text()


def test_a_server_without_the_token_of_its_cluster_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CLUSTER_TOKEN_FILE", str(tmp_path / "nowhere"))
    done = subprocess.run([sys.executable, PROGRAM, LISTED, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"cluster_token_file {tmp_path}/nowhere cannot be read" in done.stderr and "Traceback" not in done.stderr


def test_a_package_that_is_not_listed_cannot_be_imported(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    lines = LISTED.read_text("utf-8").splitlines()
    short.write_text("\n".join(line for line in lines if not line.startswith("sqlalchemy==")))
    done = subprocess.run([sys.executable, PROGRAM, short, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "of sqlalchemy is not in the image" in done.stderr
