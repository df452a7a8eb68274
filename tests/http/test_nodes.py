"""Nodes are listed, drained and used again."""

from typing import Any

import pytest

from shoal_api.client import ApiError
from shoal_service.fleet_views import DrainView, NodeView
from shoal_service.store import node_records

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
    assert {id_: dict(drain) for id_, drain in nodes.store.reading(node_records.drains)().items()} == {
        LIVE: dict(drained.drain)
    }
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
    assert nodes.store.reading(node_records.drains)() == {}


def test_a_cordon_is_visible_and_can_be_undone(nodes: Any) -> None:
    cordoned = nodes.client.cordon(LIVE, reason="bad fan")
    assert cordoned.cordon.reason == "bad fan" and cordoned.drain is None
    assert nodes.client.node(LIVE) == cordoned and nodes.store.reading(node_records.cordons)()[LIVE] == cordoned.cordon
    assert nodes.client.undo_cordon(LIVE).cordon is None
    answer = nodes.http.post(f"/v1/nodes/{DEAD}/cordon")
    assert (answer.status_code, answer.json()["code"]) == (409, "request-conflict")


def test_a_notice_for_an_address_drains_all_live_nodes_there(nodes: Any) -> None:
    drained = nodes.client.announce_preemption("10.0.0.1", deadline_s=120.0, reason="spot")
    assert [node.node_id for node in drained] == [LIVE, RAYS]
    drain = drained[0].drain
    assert (drain.source, drain.reason) == ("notice", "spot")
    assert drain.deadline == pytest.approx(drain.requested_at + 120.0)
    assert drained[1].drain.source == "ray", "Ray's own drain has precedence"
    assert nodes.client.undo_drain(LIVE).drain is None, "a notice can be withdrawn"


def test_a_notice_may_name_the_node_and_the_time_and_needs_no_body(nodes: Any) -> None:
    body = {"deadline_at": "2030-01-31T18:00:00Z"}
    answer = nodes.http.post(f"/v1/nodes/{LIVE}/preemption-notice", json=body)
    assert answer.status_code == 202 and answer.json()["items"][0]["drain"]["deadline"] == 1896112800.0
    assert nodes.http.post(f"/v1/nodes/{LIVE}/preemption-notice").status_code == 202
    answer = nodes.http.post("/v1/nodes/10.9.9.9/preemption-notice")
    assert (answer.status_code, answer.json()["code"]) == (404, "node-not-found")
