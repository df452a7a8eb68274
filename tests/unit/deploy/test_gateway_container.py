"""The script of the gateway's container, with stubs in place of Ray and Shoal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "docker" / "gateway.sh"
_NODE = """#!/bin/bash
env > "$OUT/node.env"; echo "$@" > "$OUT/node"
[ -z "${NODE_FAILS:-}" ] || exit 3
sleep infinity &
trap 'kill $!; echo ended > "$OUT/node.ended"; exit 0' TERM
wait
"""
_GATEWAY = """#!/bin/bash
env > "$OUT/gateway.env"; echo "$@" > "$OUT/gateway"
exit 1
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With `ray`, `shoal` and `python` of this test; the node answers at once."""
    programs = {"ray": _NODE, "shoal": _GATEWAY, "python": "#!/bin/bash\n[ -e $OUT/node ]\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path), "SHOAL_HOME_URL": "http://shoal:8470"}


def _run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    arguments = ["bash", SCRIPT, "http://shoal:8470", "--name=default"]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60)


def test_a_gateway_that_ends_takes_its_node_with_it(environment: dict[str, str], tmp_path: Path) -> None:
    assert _run({**environment, "RAY_HEAD": "head:6379"}).returncode == 1
    assert (tmp_path / "gateway").read_text() == "join http://shoal:8470 --name=default --ray-address=head:6379\n"
    assert "--address=head:6379 --num-cpus=0 --num-gpus=0" in (tmp_path / "node").read_text()
    assert (tmp_path / "node.ended").exists()


def test_the_node_gets_no_setting_of_shoal(environment: dict[str, str], tmp_path: Path) -> None:
    _run({**environment, "RAY_HEAD": "head:6379"})
    assert "SHOAL_HOME_URL=http://shoal:8470" in (tmp_path / "gateway.env").read_text()
    assert "SHOAL_" not in (tmp_path / "node.env").read_text()


def test_a_node_that_cannot_join_ends_the_container(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/bash\nexit 1\n")
    ended = _run({**environment, "RAY_HEAD": "head:6379", "NODE_FAILS": "1"})
    assert ended.returncode == 1 and "The Ray node could not join head:6379." in ended.stderr


def test_a_container_without_the_address_of_the_head_says_so(environment: dict[str, str]) -> None:
    ended = _run(environment)
    assert ended.returncode != 0 and "RAY_HEAD" in ended.stderr
