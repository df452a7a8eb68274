"""The OpenAPI document: up to date in docs/, complete, and true under schemathesis' fire."""

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition
from schemathesis.specs.openapi import checks as openapi_checks
from schemathesis.transport.requests import REQUESTS_TRANSPORT

from openapi import with_problems
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import PERMISSIONS, Role
from shoal_service.store import access
from shoal_workers.version import VERSION

SNAPSHOT = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
MAX_EXAMPLES = settings().max_examples // 15
Answers = Counter[tuple[str, int]]
"""Number of answers by operation and status."""


def problems_are_described(context: Any, response: Any, case: Any) -> None:
    """Not only by `default`, which describes everything."""
    if 400 <= response.status_code < 500:
        described = case.operation.definition.raw["responses"]
        examples = described[str(response.status_code)]["content"]["application/problem+json"]["examples"]
        assert response.json()["code"] in examples, case.operation.label


CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    problems_are_described,
]


def test_the_snapshot_is_up_to_date(service: Any) -> None:
    """If this change of the API is intended, run `python tools/openapi.py` and add a line to CHANGELOG.md."""
    live = service.http.get("/openapi.json").json()
    live["info"]["version"] = VERSION
    assert json.loads(SNAPSHOT.read_text()) == live


def test_every_operation_is_described_and_answers_problems(service: Any) -> None:
    document = service.http.get("/openapi.json").json()
    tags = {tag["name"] for tag in document["tags"]}
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            where = f"{verb} {path}"
            assert operation["summary"] and operation["description"], where
            assert set(operation["tags"]) <= tags, where
            assert operation["responses"]["default"] == {"$ref": "#/components/responses/Problem"}, where
            for parameter in operation.get("parameters", []):
                assert parameter["description"], where


def test_every_stream_is_described(service: Any, supervise: Any) -> None:
    job_id, num_streams = supervise(), 0
    for path, verbs in service.http.get("/openapi.json").json()["paths"].items():
        known = set(path.split("/")[2:3]) <= {"jobs", "overview", "nodes", "projects", "queue", "users", "webhooks"}
        if "get" not in verbs or not known or "{" in path.replace("{job_id}", "") or path.endswith("parity"):
            continue
        url = path.replace("{job_id}", job_id)
        with service.http.stream("GET", url, headers={"Accept": "text/event-stream"}) as response:
            media_type = response.headers["content-type"].partition(";")[0]
            num_streams += media_type == "text/event-stream"
            assert response.status_code != 200 or media_type in verbs["get"]["responses"]["200"]["content"], path
    assert num_streams == 6


def test_every_body_has_an_example_that_is_accepted(service: Any) -> None:
    document = service.http.get("/openapi.json").json()
    bodies = [operation.body for operation in service.operations.values() if operation.body is not None]
    models = {body.model.__name__: body.model for body in bodies}
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
                if "$ref" in content["schema"]:
                    model = models[content["schema"]["$ref"].rpartition("/")[2]]
                    assert model.model_validate(content["example"]), (verb, path, media_type)


def test_every_reference_resolves(service: Any) -> None:
    document = service.http.get("/openapi.json").json()

    def visit(node: object) -> None:
        if isinstance(node, dict):
            if isinstance(reference := node.get("$ref"), str):
                target: Any = document
                for part in reference.removeprefix("#/").split("/"):
                    target = target[part]
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    visit(document)


@pytest.mark.slow
def test_no_generated_request_breaks_the_service_or_its_own_description(service: Any, spec: dict[str, Any]) -> None:
    """Valid requests, about a job that exists, and invalid ones."""
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    schema.config.base_url = service.url
    REQUESTS_TRANSPORT.serializer("application/zip")(
        REQUESTS_TRANSPORT.get_first_matching_media_type("application/octet-stream")[1]
    )
    job_id = service.client.submit(spec).id
    headers = {"Authorization": service.http.headers["Authorization"]}
    for found in schema.get_all_operations():
        operation = found.ok()
        _fire(operation, schemathesis.GenerationMode.POSITIVE, job_id, headers)
        if operation.body or any(True for _ in operation.iter_parameters()):
            _fire(operation, schemathesis.GenerationMode.NEGATIVE, None, headers)


def _fire(operation: Any, mode: Any, job_id: str | None, headers: dict[str, str]) -> None:
    @settings(
        max_examples=MAX_EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def attack(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if job_id is not None and "job_id" in (case.path_parameters or {}):
            case.path_parameters["job_id"] = job_id
        if "wait" in (case.query or {}):
            case.query["wait"] = 0
        if "follow" in (case.query or {}):
            return  # it would not end
        case.call_and_validate(checks=CHECKS, timeout=30, headers=headers)

    attack()


@pytest.mark.cells(1, 3)
@pytest.mark.parametrize("role", [Role.ADMIN, Role.VIEWER, None], ids=["admin", "viewer", "nobody"])
def test_no_scenario_breaks_the_service_or_its_own_description(service: Any, role: Role | None) -> None:
    """Requests that go on with what earlier answers named: a job that was submitted is paused, patched, deleted."""
    assert _live(service, role, num_scenarios=2)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("role", [Role.ADMIN, Role.VIEWER, None], ids=["admin", "viewer", "nobody"])
def test_scenarios_reach_every_operation(service: Any, role: Role | None) -> None:
    """An operation is part of scenarios if it begins one or if an answer links to it; /metrics, for example, is not. A
    role that may change nothing gets no answers that link on, so only beginnings are asked of it."""
    machine = schemathesis.openapi.from_url(f"{service.url}/openapi.json").as_state_machine()
    first = set(machine._root_labels)
    later = {label for label, operation in machine._transitions.operations.items() if operation.incoming}
    wanted = first | later if role is Role.ADMIN else first
    assert len(first) > 10 and len(later) > 30
    made = _live(service, role, num_scenarios=2_000, enough=lambda made: {label for label, _ in made} >= wanted)
    assert {label for label, _ in made} >= wanted
    changed = {label for label, status in made if "{job_id}" in label and "GET" not in label and status < 300}
    assert bool(changed) == (role is Role.ADMIN), "operations on a job that was submitted before"


def _live(
    service: Any, role: Role | None, *, num_scenarios: int, enough: Callable[[Answers], bool] = lambda _: False
) -> Answers:
    """Run scenarios as this role, until it is enough; None: without a token."""
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    schema.config.base_url = service.url
    REQUESTS_TRANSPORT.serializer("application/zip")(
        REQUESTS_TRANSPORT.get_first_matching_media_type("application/octet-stream")[1]
    )
    headers = {}
    if role is not None:
        request = TokenRequest(name="scenarios", role=role)
        token = service.store.writing(access.create_token)(request, by="test", now=time.time()).token
        headers = {"Authorization": f"Bearer {token}"}
    made: Answers = Counter()
    machine: Any = schema.as_state_machine()

    num_run = [0]

    class Scenario(machine):  # type: ignore[misc]
        def setup(self) -> None:
            num_run[0] += 1

        def before_call(self, case: Any) -> None:
            for name in ("wait", "follow"):  # they would last
                (case.query or {}).pop(name, None)
            made_up = {name: value for name, value in (case.headers or {}).items() if name.lower() != "authorization"}
            case.headers = made_up | headers

        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"timeout": 30}

        def after_call(self, response: Any, case: Any) -> None:
            made[case.operation.label, response.status_code] += 1
            permission = case.operation.definition.raw["x-permission"]
            if permission is not None and response.status_code < 300:
                assert role in PERMISSIONS[permission].roles, case.operation.label

        def validate_response(self, response: Any, case: Any, additional_checks: Any = None, **_: Any) -> None:
            case.validate_response(response, checks=CHECKS)

    for number in count(1):
        run_settings = settings(
            max_examples=min(20, num_scenarios - num_run[0]),
            stateful_step_count=8,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        with suppress(FlakyStrategyDefinition):  # the service remembers earlier scenarios, and answers another way
            seed(number)(Scenario).run(settings=run_settings)
        if num_run[0] >= num_scenarios or enough(made):
            break
    return made


def test_the_page_of_the_rest_api_names_every_problem_and_every_route(service: Any) -> None:
    page = (SNAPSHOT.parent / "rest-api.md").read_text()
    assert with_problems(page) == page, "run `make docs`"
    for path in service.http.get("/openapi.json").json()["paths"]:
        assert path.replace("{job_id}", "{id}") in page or f"/{path.rpartition('/')[2]}`" in page or "{code}" in path
