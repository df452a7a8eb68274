"""Health, readiness, metrics, cluster, the catalogue of problems, and unexpected errors."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.processes.server import until
from shoal_api.cli.commands import doctor
from shoal_api.cli.commands.doctor import Verdict
from shoal_api.client import ServerError
from shoal_api.http.edge import is_accepted_host
from shoal_service.problems import problem_kinds


def test_health_has_the_version(service: Any) -> None:
    assert service.client.health().version == "1.2.3"


def test_readiness_names_the_owner_of_the_lease(service: Any) -> None:
    ready = service.client.ready()
    assert (ready.ready, ready.owner, ready.epoch) == (True, "tests", service.epoch)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "No Ray cluster is connected yet: it is still starting, or cannot start"),
        ("127.0.0.1:6379", "The head of the Ray cluster at 127.0.0.1:6379 does not answer"),
    ],
)
def test_a_lost_cluster_is_not_ready_but_alive(own_service: Any, address: str, words: str) -> None:
    own_service.cluster.view = own_service.cluster.view.model_copy(update={"connected": False, "address": address})
    with pytest.raises(ServerError) as caught:
        own_service.client.ready()
    assert caught.value.code == "not-ready"
    [error] = caught.value.problem.errors
    assert error.path == "cluster" and error.message.startswith(words)
    own_service.client.health()


def test_a_ready_service_lists_what_is_missing_and_the_doctor_shows_it(own_service: Any) -> None:
    assert own_service.client.ready().warnings == ()
    assert doctor.judge_server(own_service.url).verdict is Verdict.OK
    own_service.warnings.append("Nodes of the embedded Ray cluster are away: 127.0.0.4.")
    assert own_service.client.ready().warnings == tuple(own_service.warnings)
    finding = doctor.judge_server(own_service.url)
    assert finding.verdict is Verdict.WARN and finding.hint == own_service.warnings[0]


def test_the_cluster_is_shown(service: Any) -> None:
    assert service.client.cluster() == service.cluster.view


def test_metrics_are_served_and_requests_observed_by_route(service: Any) -> None:
    assert "shoal_control_plane_leader 1\n" in service.client.metrics()
    service.http.get("/v1/jobs/job-1")
    service.http.request("BREW", "/nowhere/at/all")
    routes = {("GET", "/v1/jobs/{job_id}", "4xx"), ("other", "unmatched", "4xx")}
    until(
        lambda: routes <= service.requests.finished.values().keys(), f"requests of {routes}"
    )  # counted after the answer


def test_a_scraper_that_accepts_openmetrics_gets_it(service: Any) -> None:
    answer = service.http.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n") and "\n# TYPE shoal_incidents counter\n" in answer.text
    assert service.http.get("/metrics").headers["content-type"].startswith("text/plain")


def test_metrics_are_compressed_for_a_scraper_that_accepts_it(service: Any) -> None:
    plain = service.http.get("/metrics", headers={"Accept-Encoding": "gzip;q=0, *"})
    small = service.http.get("/metrics", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers and small.headers["content-encoding"] == "gzip"
    assert small.headers["vary"] == "Accept, Accept-Encoding"
    assert int(small.headers["content-length"]) < len(plain.content) / 2
    assert small.text.splitlines()[:3] == plain.text.splitlines()[:3]


def test_every_problem_type_is_described_where_its_type_points(service: Any) -> None:
    listed = service.http.get("/problems").json()
    assert [problem["type"] for problem in listed] == [kind.uri for kind in problem_kinds().values()]
    for problem in listed:
        assert service.http.get(problem["type"]).json() == problem
    assert service.http.get("/problems/other").json()["code"] == "not-found"


@pytest.mark.parametrize(("method", "path"), [("POST", "/healthz"), ("PUT", "/v1/jobs/x"), ("POST", "/")])
def test_a_wrong_method_names_the_right_ones(service: Any, method: str, path: str) -> None:
    response = service.http.request(method, path)
    assert (response.status_code, response.json()["code"]) == (405, "method-not-allowed")
    assert {"GET", "POST"} & set(response.headers["allow"].split(", ")) - {method}


def test_an_unforeseen_error_is_a_500_with_an_id_that_is_in_the_log(own_service: Any, caplog: Any) -> None:
    own_service.cluster.view = None  # what no source may answer
    with caplog.at_level(logging.ERROR, logger="shoal_api"):
        response = own_service.http.get("/v1/cluster")
    problem = response.json()
    assert (response.status_code, problem["code"]) == (500, "internal-error")
    assert "Traceback" not in response.text and "NoneType" not in response.text
    assert problem["error_id"] in [getattr(record, "error_id", None) for record in caplog.records]
    assert "NoneType" in caplog.text
    assert own_service.http.get("/healthz").status_code == 200


def test_the_allow_header_names_the_methods_of_all_routes_of_a_path(service: Any) -> None:
    assert service.http.put("/v1/jobs").headers["allow"] == "GET, POST"
    assert service.http.put("/v1/jobs/job-1").headers["allow"] == "DELETE, GET, PATCH"


@pytest.mark.parametrize(
    ("host", "is_accepted"),
    [
        (b"", True),
        (b"127.0.0.1:8470", True),
        (b"localhost", True),
        (b"LOCALHOST:8470", True),
        (b"[::1]:8470", True),
        (b"10.1.2.3", True),
        (b"Shoal.Example.org:443", True),
        (b"evil.example.org", False),
        (b"localhost.evil.org", False),
        (b"127.0.0.1.nip.io:8470", False),
        (b"shoal.example.org.evil.org", False),
        (b"[::1", False),
        (b"\xff", False),
    ],
)
def test_only_names_of_this_server_are_accepted_as_its_host(host: bytes, is_accepted: bool) -> None:
    assert is_accepted_host(host, frozenset({"shoal.example.org"})) == is_accepted
    assert is_accepted_host(host, frozenset({"*"}))


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/"), ("GET", "/healthz")]
)
def test_a_page_whose_name_was_rebound_reads_and_changes_nothing(service: Any, method: str, path: str) -> None:
    refused = service.http.request(method, path, headers={"Host": "evil.example.org"})
    assert (refused.status_code, refused.json()["code"]) == (421, "unknown-host")
    port = service.url.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert service.http.get("/healthz", headers={"Host": f"{host}:{port}"}).status_code == 200


@pytest.mark.slow
def test_the_client_of_rays_jobs_is_answered_with_the_command_of_this_service(service: Any) -> None:
    """It prints the version that it is given when it cannot read it."""
    command = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", service.url, "--", "true"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ended.returncode != 0
    assert "this is a Shoal server" in ended.stderr and "shoal submit train.py --workers 2" in ended.stderr


def test_readiness_says_beside_the_clusters_address_how_a_program_gets_onto_it(service: Any) -> None:
    answer = service.http.get("/readyz").json()
    assert "shoal submit train.py" in answer["programs"] and "RAY_ADDRESS" in answer["programs"]
