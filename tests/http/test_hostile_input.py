"""Whatever comes in, the service answers with a problem document below 500."""

from typing import Any

import pytest

JSON_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe{}",
    b'{"name": "\xc3\x28"}',
    b"[" * 500_000,
    b'{"model":' * 70 + b"1" + b"}" * 70,
    b'{"seed": NaN}',
    b'{"seed": Infinity}',
    b'{"optimizer": {"lr": 1e999}}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"seed": ' + b"9" * 400 + b"}",
    b'{"optimizer": {"lr": ' + b"9" * 300 + b"}}",
    b'{"name": "a\\u0000b"}',
    b'{"model": {"\\ud800": 1}}',
    b'{"model": {"x": "\\udfff"}}',
    b'{"name": "a", "name": "b"}',
    b'{"stop": {"steps": 1}, "data": {"paths": ["\\u202e/../../etc/passwd"]}, "task": "os:system"}',
]
YAML_BODIES = [
    b"",
    b"a: [",
    b"\x00",
    b"\xff",
    b"[" * 500_000,
    b"{a: " * 100_000,
    b"a: &x [1]\nb: [*x, *x]",
    b"&x a: *x",
    b"!!python/object/apply:os.system [id]",
    b"seed: .nan",
    b"seed: 2020-01-01",
    b"1: 2",
    b"? [a]\n: b",
    b"model: !!binary aGVsbG8=",
    b"model: !!set {a, b}",
    b"a: 1\n---\nb: 2",
    b"seed: " + b"9" * 5000,
    b"- " * 50_000,
]


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/specs/validate"])
@pytest.mark.parametrize(
    ("media_type", "bodies"),
    [("application/json", JSON_BODIES), ("application/yaml", YAML_BODIES)],
    ids=["json", "yaml"],
)
def test_no_document_causes_a_5xx(service: Any, path: str, media_type: str, bodies: list[bytes]) -> None:
    for body in bodies:
        response = service.http.post(path, content=body, headers={"Content-Type": media_type})
        assert 200 <= response.status_code < 500, (body[:60], response.text)
        if response.status_code >= 400:
            assert response.headers["content-type"] == "application/problem+json"
            assert response.json()["code"] in ("bad-document", "invalid-spec")
    service.client.health()


@pytest.mark.parametrize("body", [body for body in JSON_BODIES if body != b"null"])
def test_no_patch_causes_a_5xx(service: Any, spec: dict[str, Any], body: bytes) -> None:
    job = service.client.submit(spec)
    response = service.http.patch(f"/v1/jobs/{job.id}", content=body, headers={"Content-Type": "application/json"})
    assert 400 <= response.status_code < 500
    assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "target",
    [
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/v1/jobs/..",
        "/v1/jobs/%ff",
        "/problems/%00",
        "/v1/code/" + "g" * 64,
        "/v1/jobs/x/events?after=-1",
        "/v1/jobs/x/events?after=9223372036854775808",
        "/v1/jobs/x/events?wait=nan",
        "/v1/jobs/x/events?wait=61",
        "/v1/jobs/x/logs?rank=1e9",
        "/v1/jobs/x/logs?tail=0",
        "/v1/jobs/x/series?max_points=0",
        "/v1/jobs?cursor=" + "A" * 600,
    ],
)
def test_hostile_targets_are_refused_as_problems(service: Any, target: str) -> None:
    response = service.http.get(target)
    assert 400 <= response.status_code < 500
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["status"] == response.status_code


def test_strange_headers_are_refused_or_ignored(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    path = f"/v1/jobs/{job.id}"
    for header in ("If-None-Match", "If-Match", "Last-Event-ID", "Accept", "Idempotency-Key"):
        for value in (b"\xff\xfe", b'"', b"*,*", b"," * 500, b"9" * 30):
            for method, rest in (("GET", ""), ("GET", "/events"), ("PATCH", "")):
                arguments = {"json": {"priority": 1}} if method == "PATCH" else {}
                response = service.http.request(method, path + rest, headers={header: value}, **arguments)
                assert response.status_code < 500, (header, value, response.text)
