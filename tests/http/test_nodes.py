"""Nodes are listed, drained and used again."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_api.client import ApiError
from shoal_service.views import DrainView, NodeView

LIVE, DEAD, RAYS = "a" * 56, "d" * 56, "e" * 56


@pytest.fixture
def nodes(own_service: Any) -> Any:
    """A service whose cluster has a live node, a dead node, and a node that Ray drains."""

    def node(node_id: str, **changes: Any) -> NodeView:
        return NodeView(node_id=node_id, ip="10.0.0.1", cpus=4, gpus=0, memory_gib=8, **{"alive": True, **changes})

    drained = DrainView(reason="drained by Ray", requested_at=1.0, source="ray")
    seen = (node(LIVE), node(DEAD, alive=False), node(RAYS, drain=drained))
    own_service.cluster.view = own_service.cluster.view.model_copy(update={"nodes": seen})
    return own_service


def test_nodes_are_listed_and_shown(nodes: Any) -> None:
    listed = nodes.client.nodes()
    assert [(n.node_id, n.alive) for n in listed] == [(LIVE, True), (DEAD, False), (RAYS, True)]
    assert nodes.client.node(LIVE) == listed[0]


def test_a_drain_is_visible_in_all_views_and_can_be_undone(nodes: Any) -> None:
    drained = nodes.client.drain(LIVE, reason="new disks", deadline_s=60.0)
    assert drained.drain.reason == "new disks" and drained.drain.source == "api"
    assert drained.drain.deadline == pytest.approx(drained.drain.requested_at + 60.0)
    assert nodes.client.node(LIVE) == drained
    assert {id_: dict(drain) for id_, drain in nodes.store.drains().items()} == {LIVE: dict(drained.drain)}
    assert nodes.client.undo_drain(LIVE).drain is None
    assert nodes.client.undo_drain(LIVE).drain is None, "undoing is idempotent"


def test_draining_again_keeps_the_time_of_the_first_and_changes_the_rest(nodes: Any) -> None:
    first = nodes.client.drain(LIVE).drain
    second = nodes.client.drain(LIVE, reason="now in earnest", deadline_s=5.0).drain
    assert second.requested_at == first.requested_at and first.deadline is None
    assert (second.reason, second.deadline is not None) == ("now in earnest", True)


def test_a_body_is_not_needed_to_drain(nodes: Any) -> None:
    answer = nodes.http.post(f"/v1/nodes/{LIVE}/drain")
    assert answer.status_code == 202 and answer.json()["drain"]["reason"] == "drain requested"


@pytest.mark.parametrize("verb", ["get", "post", "delete"])
def test_an_unknown_node_is_a_problem_of_its_own(nodes: Any, verb: str) -> None:
    answer = nodes.http.request(verb, f"/v1/nodes/{'b' * 56}" + ("" if verb == "get" else "/drain"))
    assert (answer.status_code, answer.json()["code"]) == (404, "node-not-found")


def test_what_makes_no_sense_is_refused(nodes: Any) -> None:
    for call in (lambda: nodes.client.drain(DEAD), lambda: nodes.client.undo_drain(RAYS)):
        with pytest.raises(ApiError) as caught:
            call()
        assert caught.value.code == "request-conflict"


@pytest.mark.parametrize("body", ['{"deadline_s": -1}', '{"reason": ""}', '{"until": 5}', "[]"])
def test_a_senseless_drain_request_is_refused(nodes: Any, body: str) -> None:
    answer = nodes.http.post(f"/v1/nodes/{LIVE}/drain", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert nodes.store.drains() == {}
