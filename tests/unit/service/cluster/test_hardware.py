"""What a machine has: devices, quotas, the variables of CUDA and Ray, and a kernel that accepts or refuses."""

import socket
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from shoal_service.cluster.connects import answers
from shoal_service.cluster.hardware import find, require_cpus
from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT, inherit_environment
from shoal_service.problems import SettingsError


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    directory = tmp_path / "dev"
    directory.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (directory / name).touch()
    return directory


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, 3), ("0,1", 2), ("", 0), ("-1", 0), ("1,-1,2", 1), ("0,1,2,3", 3), ("GPU-8a6", 1)]
)
def test_gpus_are_devices_that_cuda_may_see(dev: Path, visible: str | None, gpus: int) -> None:
    assert find({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, dev).gpus == gpus


def test_a_machine_without_the_driver_has_none(tmp_path: Path) -> None:
    assert find({}, tmp_path / "nowhere").gpus == 0


def test_more_nodes_than_cpus_are_refused_with_the_way_out() -> None:
    require_cpus(4, 4, found=True)
    with pytest.raises(SettingsError, match=r"this machine has 2\. Use at most 2 nodes, or --num-cpus 4"):
        require_cpus(4, 2, found=True)
    with pytest.raises(SettingsError, match="--num-cpus gives 3"):
        require_cpus(4, 3, found=False)


def test_a_port_that_accepts_and_one_that_refuses_are_answers() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        assert answers("127.0.0.1", port, within_s=5.0)
    assert answers("127.0.0.1", port, within_s=5.0)


def test_a_kernel_that_drops_connects_does_not_answer_until_it_takes_them() -> None:
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as listener:
        address = listener.getsockname()
        with closing(socket.create_connection(address)), suppress(OSError):
            assert not answers(*address, within_s=0.7)
            taker = threading.Timer(0.3, lambda: [listener.accept()[0].close() for _ in range(2)])
            taker.start()
            assert answers(*address, within_s=30.0)
            taker.join()


ROOT = Path(__file__).resolve().parents[4]


def test_the_file_for_deployed_clusters_has_the_same_settings() -> None:
    lines = (ROOT / "deploy" / "ray.env").read_text(encoding="utf-8").splitlines()
    assert dict(line.split("=", 1) for line in lines if line and not line.startswith("#")) == CLUSTER_ENVIRONMENT


def test_each_setting_is_explained() -> None:
    page = (ROOT / "docs" / "ray-cluster.md").read_text(encoding="utf-8")
    assert [name for name in CLUSTER_ENVIRONMENT if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHOAL_DATABASE_URL", "postgresql://shoal@db/shoal"),
        ("SHOAL_TOKEN", "shoal_abc"),
        ("PGPASSWORD", "secret"),
        ("DATABASE_URL", "postgresql+psycopg://shoal:secret@db/shoal"),
        ("BACKUP", "pg_dump Postgres://shoal:secret@db/shoal"),
        ("CREDENTIALS_DIRECTORY", "/run/credentials/shoal.service"),
        ("RAY_AUTH_TOKEN", "of-another-cluster"),
        ("RAY_AUTH_TOKEN_PATH", "/home/somebody/.ray/auth_token"),
    ],
)
def test_what_is_the_services_alone_is_not_inherited(name: str, value: str) -> None:
    kept = {"PATH": "/usr/bin", "AWS_PROFILE": "checkpoints", "RAY_worker_niceness": "0", "SHOALTEST": "1"}
    assert inherit_environment({**kept, name: value}) == kept


def test_a_driver_keeps_the_access_to_its_cluster() -> None:
    given = {"RAY_AUTH_TOKEN": "t", "SHOAL_PORT": "1"}
    assert inherit_environment(given, keep_ray_access=True) == {"RAY_AUTH_TOKEN": "t"}
