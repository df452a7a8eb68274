"""Paths of a spec. A relative checkpoint.url is made absolute by a client on the server's machine, and refused by the
server otherwise; so is a place that the server does not allow."""

from pathlib import Path
from typing import Any

import pytest

from shoal_api.client import Client
from shoal_api.client.spec_documents import with_absolute_paths
from shoal_service.settings import load_settings

SPEC: dict[str, Any] = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 5}}


def _spec(url: str) -> dict[str, Any]:
    return {**SPEC, "checkpoint": {"url": url}}


@pytest.mark.parametrize("url", ["runs/one", "./runs/one", "runs/../runs/one", "file://runs/one"])
def test_a_relative_checkpoint_url_is_one_directory_for_every_process(
    service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """The user's: server, supervisor and workers have other working directories."""
    monkeypatch.chdir(tmp_path)
    with Client(service.url) as client:
        job = client.submit(_spec(url))
    assert job.spec.checkpoint.url is not None
    assert job.spec.checkpoint.url.removeprefix("file://") == str(tmp_path / "runs" / "one")


@pytest.mark.parametrize("url", ["runs/one", "file://runs/one", "~/runs", "file:runs"])
def test_the_server_refuses_a_relative_checkpoint_url_and_names_the_way_out(service: Any, url: str) -> None:
    answer = service.http.post("/v1/jobs", json=_spec(url))
    assert answer.status_code == 422
    [problem] = answer.json()["errors"]
    assert problem["path"] == "checkpoint.url"
    assert repr(url) in problem["message"] and "absolute" in problem["message"]
    assert service.http.post("/v1/specs/validate", json=_spec(url)).json()["valid"] is False


@pytest.mark.parametrize(
    "url", ["/data/runs", "s3://bucket/runs", "file:///data/runs", "simplecache::s3://bucket/runs"]
)
def test_any_other_url_stays_as_it_is(service: Any, url: str) -> None:
    with Client(service.url) as client:
        assert client.submit(_spec(url)).spec.checkpoint.url == url


def test_a_place_that_the_server_does_not_allow_is_refused_at_submit(
    run_service: Any, store: Any, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    (state / "code").mkdir(parents=True)
    (tmp_path / "link").symlink_to("/etc")
    settings = load_settings(state_dir=state, allowed_paths=str(tmp_path), allow_pip="wheels")
    wrong = {
        "checkpoint.url": {"checkpoint": {"url": "/elsewhere"}},
        "data.paths": {"data": {"paths": [f"{tmp_path}/link/*"]}},
        "init_from": {"init_from": f"{tmp_path}/link/model.safetensors"},
        "code.wheels": {"code": {"pip": ["a"], "wheels": "/elsewhere"}},
        "code.working_dir": {"code": {"working_dir": str(state / "code")}},
    }
    with run_service(store, places=settings.allowed_places) as service:
        for path, change in wrong.items():
            answer = service.http.post("/v1/jobs", json=SPEC | change)
            assert (answer.status_code, [one["path"] for one in answer.json()["errors"]]) == (422, [path])
            checked = service.http.post("/v1/specs/validate", json=SPEC | change).json()
            assert [one["path"] for one in checked["errors"]] == [path]
        good = {"checkpoint": {"url": str(state / "checkpoints" / "mine")}}
        assert service.http.post("/v1/jobs", json=SPEC | good).status_code == 201


def test_a_job_goes_on_only_from_checkpoints_at_places_that_are_allowed_now(
    run_service: Any, store: Any, tmp_path: Path
) -> None:
    with run_service(store) as service:
        source = service.http.post("/v1/jobs", json=_spec("/elsewhere/runs")).json()["id"]
    settings = load_settings(state_dir=tmp_path / "state", allowed_paths=str(tmp_path))
    with run_service(store, places=settings.allowed_places) as service:
        answer = service.http.post("/v1/jobs", json=SPEC | {"continue_from": {"job": source}})
    [problem] = answer.json()["errors"]
    assert problem["path"] == "continue_from.job"
    assert "/elsewhere/runs" in problem["message"] and "SHOAL_ALLOWED_PATHS" in problem["message"]


def test_a_client_of_another_machine_does_not_guess(tmp_path: Path) -> None:
    assert with_absolute_paths(_spec("runs"), "http://trainer:8470", tmp_path) == _spec("runs")
    assert with_absolute_paths(_spec("runs"), "http://[::1]:8470", tmp_path) == _spec(f"{tmp_path}/runs")
    assert with_absolute_paths({"checkpoint": None}, "http://localhost", tmp_path) == {"checkpoint": None}


def test_relative_data_paths_start_at_the_users_directory_unless_the_job_has_code(tmp_path: Path) -> None:
    given = {"paths": ["text.txt", "/a/b.txt", "s3://bucket/*.txt"], "validation_paths": ["more/*.txt"], "field": "a"}
    made = {**given, "paths": [f"{tmp_path}/text.txt", *given["paths"][1:]]}
    made["validation_paths"] = [f"{tmp_path}/more/*.txt"]
    for document, expected in (
        ({"data": given}, {"data": made}),
        ({"data": given, "code": {}}, {"data": given, "code": {}}),
        ({"data": {"paths": 3}}, {"data": {"paths": 3}}),
    ):
        assert with_absolute_paths(document, "http://localhost", tmp_path) == expected
        assert with_absolute_paths(document, "http://trainer:8470", tmp_path) == document
