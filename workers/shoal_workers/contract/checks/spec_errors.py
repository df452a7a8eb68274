"""From a document to a JobSpec: validation, the messages for a refused one, and the JSON Schema that agrees with it.

A message has the key path, the problem and the nearest valid name. The schema is read by editors and generators (GET
/v1/spec-schema, `shoal schema`); `parse_spec` does not use it. Only rules of arithmetic over several keys (a multiple,
an order, a layout that fits) and the arguments of classes by their path are in no schema. Pure.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import UnionType
from typing import Any, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from shoal_workers.contract.checks.consistency import find_conflicts
from shoal_workers.contract.checks.legality import find_infeasible
from shoal_workers.contract.hugging_face import DPO_TASK, HF_TASK, SFT_TASK, HuggingFaceConfig, PreferenceModelConfig
from shoal_workers.contract.json_values import json_faults, shown, shown_path
from shoal_workers.contract.language_model import LM_TASK, LanguageModelConfig
from shoal_workers.contract.rules import SpecProblem as SpecProblem
from shoal_workers.contract.spec import KEYS_OF_TASKS, KEYS_OF_TASKS_ONLY, NO_END, JobSpec
from shoal_workers.contract.text_data import SECTIONS, AnswersConfig, PreferencesConfig, TextDataConfig

M = TypeVar("M", bound=BaseModel)
MAX_PROBLEMS = 40
"""Largest number of problems that are reported: a malicious document may have a million."""
_MAX_DETAILS = 1000
"""Largest number of pydantic's errors that are read; several of them may concern one problem."""


class SpecError(ValueError):
    """A spec that cannot be accepted; `problems` lists all its problems."""

    code = "invalid_spec"

    def __init__(self, problems: tuple[SpecProblem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    @classmethod
    def at(cls, path: str, message: str) -> Self:
        """Make the error of one problem, whose key has this dotted path."""
        return cls((SpecProblem(path=path, message=message),))

    def __str__(self) -> str:
        """One line per problem. The key's path is left out if the message begins with it."""
        lines = (p.message if p.message.startswith(p.path) else f"{p.path}: {p.message}" for p in self.problems)
        return "\n".join(lines)


def parse_spec(data: Any) -> JobSpec:
    """Validate a decoded YAML or JSON document, and check that its parallelism is possible.

    Types are strict, as in the published JSON Schema: `true` is no number, `1` no truth value, `"50"` neither. A whole
    number may be written as 1.0.

    Raises:
        SpecError: with all problems found, at most MAX_PROBLEMS.
    """
    faults = tuple(islice(json_faults(data), MAX_PROBLEMS))
    if faults:
        raise SpecError(faults)
    problems: list[SpecProblem] = []
    if not isinstance(data, dict):
        _validate(JobSpec, data, "", problems)
        raise SpecError(tuple(problems))
    program = next((key for key in _NOT_OF_PROGRAMS if data.get(key) is not None), None)
    if program is None and data.get("stop") is None:
        if programs := _PROGRAM_KEYS & data.keys():  # what a task lacks would not help a person who brings a program
            _validate(
                JobSpec, {key: data[key] for key in data if key in programs or key in _FOREIGN_KEYS}, "", problems
            )
            raise SpecError(tuple(problem for problem in problems if problem.path in data))
        problems.append(SpecProblem(path="stop", message=NO_END))
        data = {**data, "stop": {"steps": 1}}  # the other keys are checked too
    spec = _validate(JobSpec, data, "", problems)
    sections = _SECTIONS.get(str(data.get("task", LM_TASK)), {}) if program is None else {}
    for name, section in sections.items():
        _validate(section, data.get(name, {}), name, problems)
    if program is not None:
        problems.extend(_find_keys_of_tasks(data, program))
    if not problems and spec is not None:
        problems.extend((*find_conflicts(spec), *find_infeasible(spec)))
    if problems or spec is None:
        raise SpecError(tuple(dict.fromkeys(problems))[:MAX_PROBLEMS])
    return spec


_SECTIONS: dict[str, dict[str, type[BaseModel]]] = {
    LM_TASK: {"model": LanguageModelConfig, "data": TextDataConfig},
    HF_TASK: {"model": HuggingFaceConfig, "data": TextDataConfig},
    SFT_TASK: {"model": HuggingFaceConfig, "data": AnswersConfig},
    DPO_TASK: {"model": PreferenceModelConfig, "data": PreferencesConfig},
    **{task: {"model": model, "data": of_data} for task, (model, of_data) in SECTIONS.items()},
}
"""The sections `model` and `data` of the built-in tasks."""
_NOT_OF_PROGRAMS = {"script": KEYS_OF_TASKS, "loop": KEYS_OF_TASKS_ONLY}
"""Keys that a program does not read."""


def _find_keys_of_tasks(data: dict[str, Any], program: str) -> Iterator[SpecProblem]:
    for key in _NOT_OF_PROGRAMS[program]:
        if data.get(key) is not None:
            message = (
                f"{key} says how Shoal trains a task, and {program} is set: a {program} trains by itself and does not "
                f"see this key. Remove it, or give the {program} its value in {program}.args."
            )
            yield SpecProblem(path=key, message=message)
    if program == "script" and data.get("loop") is not None:
        yield SpecProblem(path="loop", message="loop and script are both set. Set one of them.")


def validation_problems(model: type[BaseModel], data: Any, error: ValidationError) -> tuple[SpecProblem, ...]:
    """What is wrong with `data` as a `model`, in words, with the nearest valid name of an unknown key; at most
    MAX_PROBLEMS."""
    return tuple(
        SpecProblem(path=shown_path(".".join(path)), message=text)
        for path, texts in _explained(model, data, error)
        for text in texts
    )[:MAX_PROBLEMS]


_FREE = frozenset({"model", "data"})
"""Keys whose values go to the task as they are written."""


def _whole(value: Any) -> Any:
    """`value` with floats such as 1.0 as integers: JSON Schema accepts them as whole numbers, pydantic does not."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def _validate(model: type[M], data: Any, prefix: str, problems: list[SpecProblem]) -> M | None:
    try:
        plain: Any = data
        if isinstance(data, dict):
            plain = {key: value if key in _FREE else _whole(value) for key, value in data.items()}
        return model.model_validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        known = {problem.path for problem in problems} if prefix else set()
        for inner, texts in _explained(model, data, error):
            path = shown_path(".".join([prefix, *inner] if prefix else inner))
            # the same key at JobSpec's level and at the built-in task's is one problem
            if path not in known:
                problems.extend(SpecProblem(path=path, message=text) for text in texts)
        return None


def _explained(model: type[BaseModel], data: Any, error: ValidationError) -> list[tuple[tuple[str, ...], list[str]]]:
    """Path and messages of each problem, at most MAX_PROBLEMS. The cost does not grow with the number of errors, apart
    from listing them."""
    details = error.errors(include_url=False, include_context=False)[:_MAX_DETAILS]
    places = [_place(model, detail["loc"]) for detail in details]
    return [(path, texts) for (_, path), texts in _by_path(model, data, places, details).items()]


@dataclass(frozen=True, slots=True)
class _Branch:
    """One alternative of a union that pydantic tried: the object, or a plain value."""

    path: tuple[str, ...]
    is_object: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of an error. `path` does not contain pydantic's names of union branches."""

    path: tuple[str, ...]
    owner: type[BaseModel] | None
    """The model that has the last part of `path` as a key."""
    branches: tuple[_Branch, ...]
    """The union branches that pydantic was in, outermost first."""


def _place(model: type[BaseModel], loc: Iterable[int | str]) -> _Place:
    here: type[BaseModel] | None = model
    owner: type[BaseModel] | None = None
    path: tuple[str, ...] = ()
    options: list[Any] = []
    branches: list[_Branch] = []
    element: type[BaseModel] | None = None
    for part in map(str, loc):
        if element is not None:  # this part is a position in a list of objects
            path, owner, here, element = (*path, part), None, element, None
            continue
        if len(options) > 1:  # this part is not a key: it names the branch that pydantic tried
            here = next((option for option in options if _is_model(option) and option.__name__ in part), None)
            branches.append(_Branch(path, here is not None))
            options = []
            continue
        path, owner = (*path, part), here
        field = here.model_fields.get(part) if here else None
        options = _options(field.annotation) if field else []
        here = options[0] if len(options) == 1 and _is_model(options[0]) else None
        element = _element(options)
    return _Place(path, owner, tuple(branches))


def _options(annotation: Any) -> list[Any]:
    """Return the types that a field accepts, without None."""
    args = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [arg for arg in args if arg is not type(None)]


def _element(options: list[Any]) -> type[BaseModel] | None:
    """Return the model of the elements of a field that is a list of objects; None if it is no such list."""
    args = get_args(options[0]) if len(options) == 1 and get_origin(options[0]) is tuple else ()
    return args[0] if args and _is_model(args[0]) else None


def _is_model(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, BaseModel)


def _by_path(
    model: type[BaseModel], data: Any, places: list[_Place], details: list[Any]
) -> dict[tuple[bool, tuple[str, ...]], list[str]]:
    """Messages by path. A union has only those of the branch that the user meant: the object, if the value is an
    object."""
    tried = {branch for place in places for branch in place.branches}
    unmeant = {
        branch
        for branch in tried
        if branch.is_object != isinstance(_value_at(data, branch.path), dict)
        and _Branch(branch.path, not branch.is_object) in tried
    }
    problems_by_path: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
    for place, detail in zip(places, details, strict=True):
        if unmeant.intersection(place.branches):
            continue
        either = bool(place.branches) and place.branches[-1] == _Branch(place.path, False)
        if len(problems_by_path) >= MAX_PROBLEMS and (either, place.path) not in problems_by_path:
            break  # a message with the nearest valid key takes up to a millisecond
        texts = problems_by_path.setdefault((either, place.path), [])
        text = _message(model, place, detail)
        if either and texts:  # plain alternatives, each with a message about the same value
            texts[0] = _joined(texts[0], text)
        else:
            texts.append(text)
    return problems_by_path


def _joined(first: str, second: str) -> str:
    """ "must be X (it is 3)." and "must be Y (it is 3)." -> "must be X or Y (it is 3)." """
    return f"{first.rpartition(' (it is')[0]} or {second.removeprefix('must be ')}"


def _value_at(data: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _message(model: type[BaseModel], place: _Place, detail: Any) -> str:
    text = str(detail["msg"])
    match detail["type"]:
        case "value_error":
            return text.removeprefix("Value error, ")
        case "extra_forbidden":
            return _unknown_key(place)
        case "model_type" if not place.path:
            return f"a spec is an object (keys with values); this is {shown(detail['input'])}."
        case "missing":
            return f"this key is required{_example(place)}."
        case "model_type":
            owner = place.owner.model_fields[place.path[-1]].annotation if place.owner and place.path else model
            keys = ", ".join(next(iter(m.model_fields for m in _options(owner) if _is_model(m)), ()))
            return f"must be an object with the keys {keys} (it is {shown(detail['input'])})."
        case _:
            text = _PLAIN.get(detail["type"], text).replace("Input should", "must").replace("String should", "must")
            return f"{text} (it is {shown(detail['input'])})."


_PLAIN = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be text",
    "dict_type": "must be an object",
    "tuple_type": "must be a list",
}
"""Replacements for messages of pydantic that use Python's words instead of YAML's."""


def _example(place: _Place) -> str:
    field = place.owner.model_fields.get(place.path[-1]) if place.owner else None
    return f", for example {place.path[-1]}: {json.dumps(field.examples[0])}" if field and field.examples else ""


_SCRIPT = (
    'a program that trains by itself is a script: {"script": {"file": "train.py", "args": ["--lr", "3e-4"]}}, or, '
    "without a spec, `shoal submit train.py --workers 2 -- --lr 3e-4`; see docs/porting.md."
)
_PROGRAM_KEYS = frozenset({"command", "cmd", "entrypoint", "entry_point", "program", "run", "train_loop_per_worker"})
_FOREIGN_KEYS = {
    **dict.fromkeys((*_PROGRAM_KEYS, "args", "arguments", "script_args"), _SCRIPT),
    **dict.fromkeys(
        ("num_workers", "workers", "num_processes", "nproc_per_node", "nnodes", "num_nodes", "replicas", "world_size"),
        'a job has between min_workers and max_workers workers: {"elasticity": {"min_workers": 2, "max_workers": 8}}.',
    ),
    **dict.fromkeys(
        ("gpus", "num_gpus", "use_gpu", "cpus", "num_cpus", "resources", "resources_per_worker"),
        'what each worker reserves is under worker: {"worker": {"gpus": 1, "cpus": 4}}.',
    ),
    **dict.fromkeys(
        ("env", "env_vars", "environment", "runtime_env", "working_dir", "pip", "requirements"),
        'modules, variables and packages are under code: {"code": {"working_dir": ".", "env": {"NAME": "value"}}}.',
    ),
    **dict.fromkeys(
        ("steps", "max_steps", "num_steps", "epochs", "num_epochs", "max_epochs"),
        'when training ends is under stop: {"stop": {"steps": 1000}}, or epochs, or tokens.',
    ),
    **dict.fromkeys(("lr", "learning_rate"), 'this is optimizer.lr: {"optimizer": {"lr": 3e-4}}.'),
    **dict.fromkeys(
        ("batch_size", "global_batch_size", "micro_batch_size"),
        'the global batch is under batch: {"batch": {"global_size": 64, "micro_size": 8}}.',
    ),
}
"""Keys of a whole spec that other systems have -> the way out."""


def _unknown_key(place: _Place) -> str:
    if place.owner is JobSpec and (message := _FOREIGN_KEYS.get(place.path[-1])):
        return f"unknown key {shown(place.path[-1])}: {message}"
    return unknown_name("key", place.path[-1], place.owner.model_fields if place.owner else ())


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message about a name that is not valid, with the nearest one that is.

    Args:
        kind: what the name names: key, parameter ...
    """
    valid = sorted(known)
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5) if len(name) <= 64 else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {shown(name)}.{hint} Valid {kind}s here: {', '.join(valid) or 'none'}."


_REF = "#/$defs/{model}"


def job_spec_schema() -> dict[str, Any]:
    """Return the JSON Schema of a spec; each call makes a new document."""
    sections = [section for of_task in _SECTIONS.values() for section in of_task.values()]
    models: list[type[BaseModel]] = list(dict.fromkeys([JobSpec, *sections]))
    _, document = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    definitions = document["$defs"]
    spec: dict[str, Any] = definitions.pop(JobSpec.__name__)
    return {
        **spec,
        "allOf": [
            *spec.get("allOf", ()),
            *(_require_sections(task, of_task) for task, of_task in _SECTIONS.items()),
        ],
        "$defs": definitions,
    }


def _require_sections(task: str, sections: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return the rule for the JSON Schema: what `model` and `data` are if this is the spec's task."""
    condition: dict[str, Any] = {
        "properties": {"task": {"const": task}, "script": {"type": "null"}, "loop": {"type": "null"}}
    }
    required = ["data"]
    if task != LM_TASK:  # without the key it is the built-in language model, which has a default for each of its own
        condition["required"] = ["task"]
        required = ["model", "data"]
    keys = {name: {"$ref": _REF.format(model=section.__name__)} for name, section in sections.items()}
    return {"if": condition, "then": {"properties": keys, "required": required}}
