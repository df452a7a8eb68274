from typing import Any

import pytest
from jsonschema import Draft202012Validator

from shoal_workers.contract.checks.spec_errors import job_spec_schema
from shoal_workers.contract.hugging_face import HF_TASK
from shoal_workers.contract.language_model import LM_TASK

STOP = {"stop": {"steps": 1}}
DATA = {"corpus": "python-stdlib"}
VALIDATOR = Draft202012Validator(job_spec_schema())


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"data": DATA, "model": {"dim": 64}}, None),
        ({"data": DATA, "model": {"dmi": 64}}, "model"),
        ({"data": DATA, "model": {"dim": 64}, "task": LM_TASK}, None),
        ({"data": {"corpsu": "x"}, "task": LM_TASK}, "data"),
        ({"data": DATA, "model": {"path": "/models/x"}, "task": HF_TASK}, None),
        ({"data": DATA, "model": {"dim": 64}, "task": HF_TASK}, "model"),
        ({"data": {"mine": 1}, "model": {"mine": 2}, "task": "my:Task"}, None),
    ],
)
def test_it_knows_the_keys_of_model_and_data_of_each_built_in_task(spec: dict[str, Any], wrong: str | None) -> None:
    assert {str(error.absolute_path[0]) for error in VALIDATOR.iter_errors(STOP | spec)} == (
        {wrong} if wrong else set()
    )


def test_every_key_has_a_description_that_stands_alone() -> None:
    schema = job_spec_schema()
    for name, key in schema["properties"].items():
        assert "see below" not in key.get("description", "see below" if name in ("model", "data") else ""), name
