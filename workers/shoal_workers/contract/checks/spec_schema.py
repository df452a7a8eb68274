"""The JSON Schema of a job spec, with the keys of `model` and `data` of the built-in tasks. Pure.

Read by editors and generators, from GET /v1/spec-schema and `shoal schema`. `parse_spec` does not use it, and agrees
with it; only rules of arithmetic over several keys (a multiple, an order, a layout that fits) are in no schema.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from shoal_workers.contract.model.hf import HF_TASK, HuggingFaceConfig
from shoal_workers.contract.model.lm import LM_TASK, LanguageModelConfig, TextDataConfig
from shoal_workers.contract.spec import JobSpec

_REF = "#/$defs/{model}"


def job_spec_schema() -> dict[str, Any]:
    """A new document."""
    models = (JobSpec, LanguageModelConfig, HuggingFaceConfig, TextDataConfig)
    _, document = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    definitions = document["$defs"]
    spec: dict[str, Any] = definitions.pop(JobSpec.__name__)
    return {
        **spec,
        "allOf": [
            _keys_of(LM_TASK, LanguageModelConfig, "data", is_default=True),
            _keys_of(HF_TASK, HuggingFaceConfig, "model", "data"),
        ],
        "$defs": definitions,
    }


def _keys_of(
    task: str, model: type[LanguageModelConfig | HuggingFaceConfig], *required: str, is_default: bool = False
) -> dict[str, Any]:
    """What `model` and `data` are if this is the spec's task."""
    condition: dict[str, Any] = {"properties": {"task": {"const": task}}}
    if not is_default:  # without the key it is another task
        condition["required"] = ["task"]
    keys = {"model": _reference(model.__name__), "data": _reference(TextDataConfig.__name__)}
    return {"if": condition, "then": {"properties": keys, "required": [*required]}}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=name)}
