"""Variables and secrets of the user's code: what a spec may say of them."""

from typing import Any

import pytest

from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec

BASE = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}}


def test_variables_and_secrets_are_part_of_a_spec() -> None:
    secrets = {"HUB": {"file": "/run/secrets/hub"}, "KEY": {"env": "NODE_KEY"}}
    spec = parse_spec(BASE | {"code": {"env": {"COLOUR": "green"}}, "secrets": secrets})
    assert spec.code.env == {"COLOUR": "green"}
    assert spec.model_dump(mode="json", exclude_none=True)["secrets"] == secrets


def test_the_variables_of_the_service_that_are_for_jobs_can_be_set() -> None:
    variables = {"SHOAL_TENSORBOARD": "runs", "SHOAL_RAY_DATA_POSITION": "0", "SHOAL_WARM_IMPORTS": "0"}
    assert parse_spec(BASE | {"code": {"env": variables}}).code.env == variables


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"code": {"env": {"SHOAL_PRELOAD": "x"}}}, "the service sets"),
        ({"code": {"env": {"RAY_AUTH_TOKEN": "x"}}}, "the service sets"),
        ({"secrets": {"RAY_X": {"env": "X"}}}, "the service sets"),
        ({"secrets": {"X": {"env": "SHOAL_DATABASE_URL"}}}, "the service sets"),
        ({"code": {"env": {"A=B": "x"}}}, "not the name of a variable"),
        ({"code": {"env": {"1A": "x"}}}, "not the name of a variable"),
        ({"code": {"env": {"A": "x\0"}}}, "null character"),
        ({"code": {"env": {"A": "x" * 40_000}}}, "32768 are allowed"),
        ({"secrets": {"A": {}}}, "exactly one of file and env"),
        ({"secrets": {"A": {"env": "B", "file": "/c"}}}, "exactly one of file and env"),
        ({"secrets": {"A": {"file": "relative"}}}, "absolute path"),
        ({"secrets": {"A": {"value": "in the spec"}}}, "value"),
        ({"code": {"env": {"A": "x"}}, "secrets": {"A": {"env": "B"}}}, "in code.env and in secrets"),
    ],
)
def test_what_cannot_be_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_spec(BASE | change)
