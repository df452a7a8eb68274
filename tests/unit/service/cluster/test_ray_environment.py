from pathlib import Path

import pytest

from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT, inherited

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
    assert inherited({**kept, name: value}) == kept


def test_a_driver_keeps_the_access_to_its_cluster() -> None:
    given = {"RAY_AUTH_TOKEN": "t", "SHOAL_PORT": "1"}
    assert inherited(given, keep_ray_access=True) == {"RAY_AUTH_TOKEN": "t"}
