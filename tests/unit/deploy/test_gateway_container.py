"""The scripts of the gateway's container and of its node's, with stubs in place of Ray and Shoal."""

import os
import subprocess
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[3] / "deploy" / "docker"
_PROGRAMS = {
    "ray": """#!/bin/bash
env > "$OUT/node.env"; echo "$@" > "$OUT/node"; umask > "$OUT/node.umask"
""",
    "shoal": """#!/bin/bash
echo "$@" > "$OUT/gateway"; umask > "$OUT/gateway.umask"
[ -n "${GOES_ON:-}" ] || exit 3
sleep infinity & trap 'kill $!; echo ended > "$OUT/gateway.ended"; exit 0' TERM
wait
""",
    "python": """#!/bin/bash
[ -e "$OUT/answers" ] && { [ -z "${GOES_ON:-}" ] || [ ! -e "$OUT/gateway" ]; }
""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With `ray`, `shoal` and `python` of this test; the node answers."""
    for name, text in _PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "answers").touch()
    (tmp_path / "sessions" / "session_before").mkdir(parents=True)
    sessions = {"RAY_SESSIONS": str(tmp_path / "sessions")}
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path), "RAY_HEAD": "head:6379", **sessions}


def _run(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    arguments = ["bash", DOCKER / script, "http://shoal:8470", "--name=default"]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60)


def test_a_gateway_that_ends_ends_its_container(environment: dict[str, str], tmp_path: Path) -> None:
    assert _run("gateway.sh", environment).returncode == 3
    assert (tmp_path / "gateway").read_text() == "join http://shoal:8470 --name=default --ray-address=head:6379\n"
    assert not (tmp_path / "node").exists(), "jobs can start code on a node, so it is not in this container"


def test_a_gateway_whose_node_is_away_for_long_ends(environment: dict[str, str], tmp_path: Path) -> None:
    ended = _run("gateway.sh", {**environment, "GOES_ON": "1", "CHECK_S": "0.01"})
    assert ended.returncode == 0 and "does not answer" in ended.stderr
    assert (tmp_path / "gateway.ended").exists()


def test_the_node_has_no_cpus_and_no_session_of_before(environment: dict[str, str], tmp_path: Path) -> None:
    assert _run("gateway-node.sh", environment).returncode == 0
    assert (
        f"start --address=head:6379 --temp-dir={tmp_path}/sessions/tmp --num-cpus=0 --num-gpus=0"
        in (tmp_path / "node").read_text()
    )
    assert list((tmp_path / "sessions").iterdir()) == []


def test_the_gateway_can_open_the_sockets_of_a_node_of_its_group(environment: dict[str, str], tmp_path: Path) -> None:
    _run("gateway-node.sh", environment)
    _run("gateway.sh", environment)
    assert [(tmp_path / f"{name}.umask").read_text() for name in ("node", "gateway")] == ["0007\n"] * 2


@pytest.mark.parametrize("script", ["gateway.sh", "gateway-node.sh"])
def test_a_container_without_the_address_of_the_head_says_so(environment: dict[str, str], script: str) -> None:
    ended = _run(script, {name: value for name, value in environment.items() if name != "RAY_HEAD"})
    assert ended.returncode != 0 and "RAY_HEAD" in ended.stderr
