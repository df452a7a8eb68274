"""The OpenAPI document: up to date in docs/, complete, and true under schemathesis' fire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SNAPSHOT = Path(__file__).parents[2] / "docs" / "openapi.json"
MAX_EXAMPLES = 15


def test_the_snapshot_is_up_to_date(service: Any) -> None:
    """If this change of the API is on purpose: run `python docs/openapi.py`, and say it in the changelog."""
    live = service.http.get("/openapi.json").json()
    live["info"]["version"] = "0"
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
                assert parameter.get("description") or parameter["name"] in (
                    "limit",
                    "code",
                    "If-Match",
                    "If-None-Match",
                )


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


def test_no_generated_request_breaks_the_service_or_its_own_description(service: Any) -> None:
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    schema.config.base_url = service.url
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.checks.CHECKS.get_one("status_code_conformance"),
        schemathesis.checks.CHECKS.get_one("content_type_conformance"),
        schemathesis.checks.CHECKS.get_one("response_schema_conformance"),
    ]
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            _fire(operation, mode, checks)


def _fire(operation: Any, mode: Any, checks: list[Any]) -> None:
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
        if "wait" in (case.query or {}):
            case.query["wait"] = 0
        if (case.headers or {}).get("Accept", "").startswith("text/event-stream") or "follow" in (case.query or {}):
            return  # streams do not end
        case.call_and_validate(checks=checks, timeout=30)

    attack()
