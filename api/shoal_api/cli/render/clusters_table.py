"""The table of `shoal clusters`, and the page of `shoal cluster`. Pure, as `tables`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.tables import new_table, nodes_table
from shoal_service.core.quantities import duration_text
from shoal_service.fleet_views import ClusterSummary, ClusterView


def clusters_table(clusters: Sequence[ClusterSummary]) -> Table | Text:
    if not clusters:
        return Text(
            "no cluster has joined; `shoal token create NAME --cluster CLUSTER` makes the token for `shoal join`",
            style="dim",
        )
    has_gpus = any(one.gpus_total for one in clusters)
    gpus = (">GPUs free",) if has_gpus else ()
    table = new_table("cluster", "state", ">nodes", ">CPUs free", *gpus, ">jobs", "labels", "why")
    for one in clusters:
        table.add_row(
            one.name,
            _state(one),
            str(one.num_nodes),
            f"{one.cpus_free:g}/{one.cpus_total:g}",
            *((f"{one.gpus_free:g}/{one.gpus_total:g}",) if has_gpus else ()),
            str(one.num_jobs),
            ", ".join(f"{name}={value}" for name, value in sorted(one.labels.items())) or "-",
            _why(one),
        )
    return table


def cluster_page(cluster: ClusterView) -> list[Any]:
    head = Text("connected" if cluster.connected else "not connected", style="green" if cluster.connected else "red")
    head.append(f"  {cluster.address}", style="dim")
    free = f"CPUs {cluster.cpus_free:g} of {cluster.cpus_total:g} free"
    if cluster.gpus_total:
        free += f", GPUs {cluster.gpus_free:g} of {cluster.gpus_total:g} free"
    owner = Text(f"control plane {cluster.owner}, epoch {cluster.epoch}", style="dim")
    several = [clusters_table(cluster.clusters), Text("")] if len(cluster.clusters) > 1 else []
    return [head, Text(free), owner, *several, nodes_table(cluster.nodes)]


def _state(one: ClusterSummary) -> Text:
    if not one.connected:
        return Text("away" if one.silent_s is not None else "not joined", style="red")
    return Text("cordoned", style="yellow") if one.cordon is not None else Text("connected", style="green")


def _why(one: ClusterSummary) -> str:
    silent = f"silent for {duration_text(one.silent_s)}" if not one.connected and one.silent_s is not None else ""
    cordoned = f"cordoned: {one.cordon.reason}" if one.cordon is not None else ""
    return "; ".join(filter(None, (one.why_away, silent, cordoned)))
