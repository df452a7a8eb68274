"""`shoal nodes`: the state of a node in one word."""

from __future__ import annotations

import pytest
from rich.console import Console

from shoal_api.cli.render.tables import nodes_table
from shoal_service.fleet_views import DrainView, NodeView


@pytest.mark.parametrize(("num_workers", "words"), [(0, "drained"), (2, "draining")])
def test_a_node_is_drained_once_no_worker_is_left_on_it(num_workers: int, words: str) -> None:
    """It was "drained" at once, while a job trained there."""
    drain = DrainView(reason="new disks", requested_at=1.0, source="api")
    node = NodeView(
        node_id="a" * 56, ip="10.0.0.1", alive=True, cpus=4, gpus=0, memory_gib=8, drain=drain, num_workers=num_workers
    )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(nodes_table([node]))
    shown = capture.get()
    assert f" {words} " in shown and "new disks" in shown
    assert ("2 workers left" in shown) == bool(num_workers)


def test_what_others_have_reserved_on_a_node_is_said() -> None:
    node = NodeView(node_id="a" * 56, ip="10.0.0.1", alive=True, cpus=8, gpus=1, memory_gib=8, cpus_of_others=6)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(nodes_table([node]))
    assert "others have reserved 6 CPU" in capture.get()
