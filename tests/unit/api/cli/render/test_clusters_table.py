"""`shoal clusters` on a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console

from shoal_api.cli.render.clusters_table import clusters_table
from shoal_service.core.nodes import Cordon
from shoal_service.fleet_views import ClusterSummary


def shown(*clusters: ClusterSummary) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(clusters_table(clusters))
    return capture.get()


def test_every_cluster_is_readable_at_80_columns() -> None:
    default = ClusterSummary(name="default", connected=True, num_nodes=3, cpus_total=48, cpus_free=7.5, num_jobs=4)
    west = ClusterSummary(
        name="west-of-the-river-1",
        why_away="its gateway has not reported for 95 s",
        silent_s=95.0,
        gpus_total=64,
        gpus_free=8,
        labels={"region": "eu", "tier": "spot"},
        cordon=Cordon(reason="new switches", requested_at=1.0),
    )
    text = shown(default, west)
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in ("7.5/48", "8/64", "region=eu, tier=spot", "cordoned: new switches", "has not reported for 95 s"):
        assert words in text, words


def test_a_cluster_without_gpus_has_no_column_for_them_and_one_that_never_came_is_not_away() -> None:
    text = shown(ClusterSummary(name="new", why_away="its gateway has not reported yet"))
    assert "GPUs" not in text and "not joined" in text


def test_without_a_cluster_the_way_to_one_is_shown() -> None:
    assert "shoal token create" in shown()
