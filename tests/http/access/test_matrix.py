"""The authorisation matrix: every operation of the API, as each role, with and without projects, and without a token.

The rows come from the application's own routes, the expected answers from the table of permissions: a route that
forgets what it needs, or needs something else than it says, fails here.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from shoal_service.access_views import ClusterTokenRequest, TokenRequest
from shoal_service.core.access import PERMISSIONS, Permission, Role
from shoal_service.store import access, cluster_links, submissions
from shoal_workers.contract.checks.spec_errors import parse_spec

DOCUMENT = "openapi.json"
SAMPLES = {"number": "1", "sha256": "0" * 64, "token_id": "00000000", "code": "forbidden"}
SAMPLES["cluster"] = "east"


@dataclass(frozen=True)
class Asker:
    name: str
    role: Role | None
    bound: bool
    headers: dict[str, str]


@dataclass(frozen=True)
class World:
    """A job of the project `own`, a job of the project `other`, and who asks for them."""

    service: Any
    own: str
    other: str
    askers: tuple[Asker, ...]
    operations: dict[tuple[str, str], Permission | None]
    http: httpx.Client
    """Without a token."""


@pytest.fixture(scope="module")
def world(service: Any) -> Iterator[World]:
    store, now = service.store, time.time()
    spec = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 10}}
    own, other = (
        store.writing(submissions.create)(
            parse_spec({**spec, "name": name, "project": name}), idempotency_key=None, now=now
        )[0].id
        for name in ("own", "other")
    )
    askers = [Asker("nobody", None, False, {})]
    for role in Role:
        for projects in (None, ("own",)):
            if projects is not None and role in (Role.ADMIN, Role.GATEWAY):
                continue
            if role is Role.GATEWAY:
                made = store.writing(cluster_links.create_token)(
                    SAMPLES["cluster"], ClusterTokenRequest(), by="test", now=now
                )
            else:
                request = TokenRequest(name=f"{role}", role=role, projects=projects)
                made = store.writing(access.create_token)(request, by="test", now=now)
            name = f"{role} of own" if projects else str(role)
            askers.append(Asker(name, role, projects is not None, {"Authorization": f"Bearer {made.token}"}))
    document = service.http.get(f"/{DOCUMENT}").json()
    operations = {
        (method.upper(), path): None if known["x-permission"] is None else Permission(known["x-permission"])
        for path, methods in document["paths"].items()
        for method, known in methods.items()
    }
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as http:
        yield World(service, own, other, tuple(askers), operations, http)
    for job_id in (own, other):
        service.client.cancel(job_id)


def ask(world: World, asker: Asker, method: str, path: str, job_id: str) -> int:
    """Send a request with a body that means nothing, so that an asker who may change something changes nothing."""
    filled = re.sub(r"{(\w+)}", lambda found: SAMPLES.get(found[1], "unknown"), path.replace("{job_id}", job_id))
    if (method, path) == ("DELETE", "/v1/clusters/{cluster}"):
        filled = "/v1/clusters/unknown"  # that of the gateway that asks would be removed, with its token
    if path.endswith("/{name}") and "checkpoints" not in path and "files" not in path:
        filled = path.replace("{name}", "own" if "projects" in path else "ada")
    headers = dict(asker.headers)
    if method in ("POST", "PUT", "PATCH"):
        headers["Content-Type"] = "text/nonsense"
    world.http.cookies.clear()  # of the session of another asker
    parameters = {"dry_run": "true"} if path == "/v1/gc" else {}
    return world.http.request(method, filled, params=parameters, headers=headers).status_code


def expected(world: World, asker: Asker, permission: Permission | None) -> str:
    if permission is None:
        return "allowed"
    if asker.role is None:
        return "401"
    row = PERMISSIONS[permission]
    return "allowed" if asker.role in row.roles and (row.of_projects or not asker.bound) else "403"


def outcome(status: int) -> str:
    return str(status) if status in (401, 403) else "allowed"


CHANGES_JOBS = re.compile(r"/v1/jobs/{job_id}/(cancel|pause|resume)$|DELETE /v1/jobs/{job_id}$")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_operation_answers_each_role_as_the_table_says(world: World) -> None:
    """Whoever may ask gets past the check: to the document, or to a refusal of what was sent."""
    wrong = []
    for (method, path), permission in world.operations.items():
        for asker in world.askers:
            wanted = expected(world, asker, permission)
            if path == "/v1/session" and method == "POST":
                wanted = "allowed"
            would_change = wanted == "allowed" and CHANGES_JOBS.search(f"{method} {path}")
            job_id = "job-unknown" if would_change else world.own
            found = outcome(ask(world, asker, method, path, job_id))
            if found != wanted:
                wrong.append(f"{method} {path} as {asker.name}: {found}, not {wanted}")
    assert wrong == []
    assert len(world.operations) > 60 and len(world.askers) == 9


def test_a_job_of_another_project_does_not_exist(world: World) -> None:
    bound = [asker for asker in world.askers if asker.bound and asker.role is not Role.SCRAPER]
    of_jobs = [(method, path) for method, path in world.operations if "{job_id}" in path]
    assert len(of_jobs) > 20
    for method, path in of_jobs:
        for asker in bound:
            may = expected(world, asker, world.operations[method, path]) == "allowed"
            assert ask(world, asker, method, path, world.other) == (404 if may else 403), (method, path, asker.name)


def test_every_route_of_the_application_is_in_the_matrix(world: World) -> None:
    """Those of the pages, and the one for the client of Ray's jobs, have no data and are not part of the API's
    document."""
    declared = world.service.declarations
    shells = {
        "/",
        "/workspace",
        "/compare",
        "/sweeps",
        "/models",
        "/fleet",
        "/account",
        "/docs",
        "/jobs/{job_id}",
        "/login",
    }
    shells |= {"/runbook", "/api/version", "/favicon.ico"}
    api = {key for key in declared if key[1] not in shells and not key[1].startswith("/static/")}
    assert api == set(world.operations)
    assert {declared["GET", path] for path in shells - {"/login", "/runbook", "/api/version", "/favicon.ico"}} == {
        Permission.WHOAMI
    }
