"""Operators list, cordon, label and remove clusters, and users move jobs between them."""

import time
from typing import Any

import pytest

from kit.processes.server import until
from shoal_api.client import ApiError
from shoal_service.access_views import ClusterTokenRequest, TokenRequest
from shoal_service.core.access import Role
from shoal_service.fleet_views import ClusterSummary, NodeView
from shoal_service.store import cluster_links, driving

NODE = "a" * 56


@pytest.fixture
def two(own_service: Any) -> Any:
    """A service of two clusters, of which the second is away, and for a third only a token was made."""
    store = own_service.store
    for name in ("default", "west", "north"):
        store.writing(cluster_links.create_token)(name, ClusterTokenRequest(), by="test", now=time.time())
    summaries = (
        ClusterSummary(name="default", address="10.0.0.1:6379", connected=True, num_nodes=1, cpus_total=4, cpus_free=1),
        ClusterSummary(name="west", address="10.1.0.1:6379", why_away="its gateway is silent for 9 s", silent_s=9.0),
    )
    node = NodeView(node_id=NODE, ip="10.0.0.1", cluster="default", alive=True, cpus=4, gpus=0, memory_gib=8)
    own_service.cluster.view = own_service.cluster.view.model_copy(update={"clusters": summaries, "nodes": (node,)})
    return own_service


def run_in(service: Any, spec: Any, cluster: str) -> str:
    """The id of a job with an attempt there."""
    job = service.client.submit(spec)
    service.store.writing(driving.begin_attempt, service.epoch)(job.id, workers=1, cluster=cluster, now=time.time())
    return str(job.id)


def refused(call: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value


def test_clusters_are_listed_as_the_scheduler_sees_them_with_what_operators_have_set(two: Any, spec: Any) -> None:
    run_in(two, spec, "west")
    two.client.label_cluster("west", {"region": "eu"})
    default, west, north = two.client.clusters()
    assert (default.name, default.connected, default.cpus_free) == ("default", True, 1)
    assert (west.name, west.silent_s, west.labels, west.num_jobs) == ("west", 9.0, {"region": "eu"}, 1)
    assert (north.name, north.connected, north.why_away) == ("north", False, "its gateway has not reported yet")
    assert two.client.joined_cluster("west") == west
    assert two.http.get("/v1/overview").json()["clusters"] == [
        one.model_dump(mode="json") for one in (default, west, north)
    ]


def test_a_cordon_is_shown_with_the_cluster_and_its_nodes_and_can_be_undone(two: Any) -> None:
    cordoned = two.client.cordon_cluster("default", reason="new switches")
    assert cordoned.cordon is not None and cordoned.cordon.reason == "new switches"
    assert two.client.node(NODE).cordon.reason == "the cluster 'default' is cordoned: new switches"
    two.client.cordon(NODE, reason="a fan is loud")
    assert two.client.node(NODE).cordon.reason == "a fan is loud", "its own is the nearer one"
    two.client.undo_cordon(NODE)
    assert two.client.uncordon_cluster("default").cordon is None
    assert two.client.node(NODE).cordon is None
    assert two.http.post("/v1/clusters/west/cordon").json()["cordon"]["reason"] == "cordon requested"


def test_labels_are_merged_and_those_that_no_node_can_have_are_refused(two: Any) -> None:
    two.client.label_cluster("west", {"region": "eu", "tier": "1"})
    assert two.client.label_cluster("west", {"tier": None}).labels == {"region": "eu"}
    error = refused(lambda: two.client.label_cluster("west", {"region": "a b"}))
    assert error.code == "invalid-request" and "labels:" in str(error)


def test_a_cluster_that_is_removed_is_gone_with_its_tokens(two: Any) -> None:
    made = two.client.create_cluster_token("west", ClusterTokenRequest(name="gw"))
    assert [one.name for one in two.client.cluster_tokens("west")] == ["gw", "gateway"]
    headers = {"Authorization": f"Bearer {made.token}"}
    orders = "/v1/clusters/west/orders?life=00112233445566aa"
    assert two.http.get(orders, headers=headers).status_code == 409  # valid, although another gateway speaks
    two.client.remove_cluster("west")
    assert [one.name for one in two.client.clusters()] == ["default", "north"]
    assert two.http.get(orders, headers=headers).status_code == 401
    assert all(one.revoked_at is not None for one in two.client.tokens() if one.cluster == "west")


def test_a_cluster_with_jobs_is_removed_only_by_force(two: Any, spec: Any) -> None:
    run_in(two, spec, "west")
    error = refused(lambda: two.client.remove_cluster("west"))
    assert error.code == "cluster-conflict"
    assert "1 job has an attempt there" in str(error) and "shoal clusters remove west --force" in str(error)
    two.client.remove_cluster("west", force=True)
    assert "west" not in {one.name for one in two.client.clusters()}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/clusters/nowhere"),
        ("DELETE", "/v1/clusters/nowhere"),
        ("POST", "/v1/clusters/nowhere/cordon"),
        ("DELETE", "/v1/clusters/nowhere/cordon"),
        ("GET", "/v1/clusters/nowhere/tokens"),
    ],
)
def test_an_unknown_cluster_is_a_problem_of_its_own(two: Any, method: str, path: str) -> None:
    answer = two.http.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (404, "cluster-not-found")
    assert "No cluster has joined as 'nowhere'" in answer.json()["detail"]


def test_a_job_is_moved_with_a_new_version_of_its_spec(two: Any, spec: Any) -> None:
    job_id = run_in(two, spec, "default")
    moved = two.client.move(job_id, "west")
    assert (moved.spec.worker.cluster, moved.spec_version, moved.status.cluster) == ("west", 2, "default")
    [event] = [one for one in two.client.events(job_id) if one.type == "job.move_requested"]
    assert event.message == "bootstrap moves the job to cluster west from default"
    assert "job.patched" not in {one.type for one in two.client.events(job_id)}
    assert two.client.move(job_id, "west").spec_version == 2, "a repeated request changes nothing"
    assert two.client.move(job_id, "any").spec.worker.cluster == "any"
    answer = two.http.post(f"/v1/jobs/{job_id}/move", json={"to": "any", "at_once": True})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")


def test_a_move_at_once_takes_the_workers_and_is_checked_although_it_is_repeated(two: Any, spec: Any) -> None:
    job_id = run_in(two, spec, "default")
    two.client.move(job_id, "west")
    two.cluster.why_not["west"] = "its nodes cannot read the checkpoints"
    assert refused(lambda: two.client.move(job_id, "west", at_once=True)).code == "move-refused"
    del two.cluster.why_not["west"]
    two.client.move(job_id, "west", at_once=True)
    [row] = two.store.reading(driving.to_drive)()
    assert row.granted_workers == 0


def test_a_patch_of_the_cluster_is_checked_as_a_move(two: Any, spec: Any) -> None:
    job_id = run_in(two, spec, "default")
    two.cluster.why_not["west"] = "it is full"
    for body in ({"worker": {"cluster": "west"}}, {"worker": {"cluster": "nowhere"}}):
        answer = two.http.patch(f"/v1/jobs/{job_id}", json=body)
        assert answer.json()["code"] in ("move-refused", "cluster-not-found")
    del two.cluster.why_not["west"]
    answer = two.http.patch(f"/v1/jobs/{job_id}", json={"worker": {"cluster": "west"}, "priority": 7})
    assert answer.status_code == 200 and answer.json()["spec"]["worker"]["cluster"] == "west"
    types = [one.type for one in two.client.events(job_id)]
    assert "job.patched" in types and "job.move_requested" in types


def test_a_move_that_cannot_succeed_is_refused_with_its_reason(two: Any, spec: Any) -> None:
    job_id = run_in(two, spec, "default")
    two.cluster.why_not["west"] = "its nodes cannot read the checkpoints at /data: use a shared directory"
    error = refused(lambda: two.client.move(job_id, "west"))
    assert error.code == "move-refused"
    assert "cannot be moved to cluster west: its nodes cannot read the checkpoints at /data" in str(error)
    assert refused(lambda: two.client.move(job_id, "nowhere")).code == "cluster-not-found"
    assert two.client.job(job_id).spec_version == 1
    answer = two.http.post(f"/v1/jobs/{job_id}/move", json={"to": "Not A Name"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")


def test_a_job_that_has_ended_is_not_moved(two: Any, spec: Any) -> None:
    job = two.client.submit(spec)
    two.client.cancel(job.id)
    assert refused(lambda: two.client.move(job.id, "west")).code == "job-ended"


def test_a_move_is_refused_if_the_job_has_changed_in_the_meantime(two: Any, spec: Any) -> None:
    job = two.client.submit(spec)
    two.http.patch(f"/v1/jobs/{job.id}", json={"priority": 3})
    assert refused(lambda: two.client.move(job.id, "west", if_match=job.etag)).code == "precondition-failed"
    assert two.client.move(job.id, "west", if_match=two.client.job(job.id).etag).spec.worker.cluster == "west"


def test_viewers_read_clusters_operators_move_jobs_and_admins_change_clusters(two: Any, spec: Any) -> None:
    job_id = run_in(two, spec, "default")
    asked = {
        "read": ("GET", "/v1/clusters", {}),
        "move": ("POST", f"/v1/jobs/{job_id}/move", {"json": {"to": "west"}}),
        "cordon": ("POST", "/v1/clusters/west/cordon", {}),
        "label": ("PATCH", "/v1/clusters/west", {"json": {"labels": {}}}),
        "tokens": ("GET", "/v1/clusters/west/tokens", {}),
    }
    allowed: dict[Role, set[str]] = {}
    for role in (Role.VIEWER, Role.OPERATOR, Role.ADMIN):
        made = two.client.create_token(TokenRequest(name=f"a-{role}", role=role))
        headers = {"Authorization": f"Bearer {made.token}"}
        found = {n: two.http.request(m, p, headers=headers, **more).status_code for n, (m, p, more) in asked.items()}
        allowed[role] = {name for name, status in found.items() if status != 403}
    assert allowed == {Role.VIEWER: {"read"}, Role.OPERATOR: {"read", "move"}, Role.ADMIN: set(asked)}


def test_a_cluster_that_is_away_is_a_warning_of_a_service_that_is_ready(two: Any) -> None:
    warnings = two.client.ready().warnings
    assert warnings == ("Cluster west is unreachable: its gateway is silent for 9 s. Its jobs train on.",)


def test_the_labels_that_a_gateway_is_given_are_those_of_its_cluster(make_gateway: Any, store: Any) -> None:
    make_gateway(labels={"region": "eu"})
    until(
        lambda: [one.labels for one in store.reading(cluster_links.list_clusters)()] == [{"region": "eu"}],
        "the first report",
    )


def test_jobs_are_found_by_their_cluster(two: Any, spec: Any) -> None:
    here, there = run_in(two, spec, "default"), run_in(two, spec, "west")
    listed = {one.id: one.cluster for one in two.client.jobs()}
    assert (listed[here], listed[there]) == ("default", "west")
    found = two.http.get("/v1/overview", params={"cluster": "west"}).json()
    assert [(one["id"], one["cluster"]) for one in found["items"]] == [(there, "west")] and found["total"] == 1
