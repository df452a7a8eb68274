"""A relative checkpoint.url: made absolute by a client on the server's machine, refused by the server otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal_api.client import Client
from shoal_api.client.checkpoint_url import with_absolute_checkpoint

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


def test_a_client_of_another_machine_does_not_guess(tmp_path: Path) -> None:
    assert with_absolute_checkpoint(_spec("runs"), "http://trainer:8470", tmp_path) == _spec("runs")
    assert with_absolute_checkpoint(_spec("runs"), "http://[::1]:8470", tmp_path) == _spec(f"{tmp_path}/runs")
    assert with_absolute_checkpoint({"checkpoint": None}, "http://localhost", tmp_path) == {"checkpoint": None}
