"""The way in for a job spec, and what a user reads when it is refused: key path, what is wrong, nearest valid name."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.lm import LM_TASK, LanguageModelConfig, TextDataConfig
from shoal_workers.contract.spec import JobSpec

M = TypeVar("M", bound=BaseModel)


class SpecProblem(Frozen):
    """One thing that is wrong with a spec."""

    path: str
    """Dotted path of the key, for example `batch.global_size`; empty for the spec as a whole."""
    message: str


class SpecError(ValueError):
    """A spec that cannot be accepted; `problems` says everything that is wrong with it at once."""

    code = "invalid_spec"

    def __init__(self, problems: tuple[SpecProblem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(f"{p.path}: {p.message}" if p.path else p.message for p in self.problems)


def parse_spec(data: Any) -> JobSpec:
    """Validate a decoded YAML or JSON document.

    Raises:
        SpecError: with every problem that was found.
    """
    problems: list[SpecProblem] = []
    spec = _validate(JobSpec, data, "", problems)
    task = data.get("task", LM_TASK) if isinstance(data, dict) else None
    if task == LM_TASK:
        _validate(LanguageModelConfig, data.get("model", {}), "model", problems)
        _validate(TextDataConfig, data.get("data", {}), "data", problems)
    if problems or spec is None:
        unique = {(p.path, p.message): p for p in problems}
        raise SpecError(tuple(unique.values()))
    return spec


def _validate(model: type[M], data: Any, prefix: str, problems: list[SpecProblem]) -> M | None:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            path = _dotted(prefix, detail["loc"])
            problems.append(SpecProblem(path=path, message=_message(model, detail, path)))
        return None


def _message(model: type[BaseModel], detail: Any, path: str) -> str:
    if detail["type"] == "extra_forbidden":
        return _unknown_key(model, [str(part) for part in detail["loc"]])
    text = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] in ("value_error", "missing"):
        return text if detail["type"] == "value_error" else "this key is required."
    shown = repr(detail["input"])
    return f"{text} (it is {shown if len(shown) <= 80 else shown[:77] + '...'})."


def _unknown_key(model: type[BaseModel], loc: list[str]) -> str:
    known = _keys_at(model, loc[:-1])
    near = difflib.get_close_matches(loc[-1], known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown key {loc[-1]!r}.{hint} Valid keys here: {', '.join(sorted(known))}."


def _keys_at(model: type[BaseModel], loc: list[str]) -> list[str]:
    """The keys that are valid in the object at `loc`, looking through unions."""
    here: type[BaseModel] = model
    for part in loc:
        field = here.model_fields.get(part)
        if field is None:  # the branch of a union that pydantic names in the path
            continue
        options = [field.annotation, *get_args(field.annotation)]
        models = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        here = models[0] if models else here
    return list(here.model_fields)


def _dotted(prefix: str, loc: tuple[int | str, ...]) -> str:
    parts = [str(part) for part in loc if not (isinstance(part, str) and (part.endswith("Spec") or "[" in part))]
    return ".".join([prefix, *parts] if prefix else parts)
