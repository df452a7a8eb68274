from __future__ import annotations

from pathlib import Path

from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[4]


def test_the_file_for_deployed_clusters_has_the_same_settings() -> None:
    lines = (ROOT / "deploy" / "ray.env").read_text(encoding="utf-8").splitlines()
    assert dict(line.split("=", 1) for line in lines if line and not line.startswith("#")) == CLUSTER_ENVIRONMENT


def test_each_setting_is_explained() -> None:
    page = (ROOT / "docs" / "ray-cluster.md").read_text(encoding="utf-8")
    assert [name for name in CLUSTER_ENVIRONMENT if f"`{name}`" not in page] == []
