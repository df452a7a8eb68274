"""The server and the published JSON Schema accept the same specs, apart from listed differences."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kit.cases import failed_cases
from shoal_workers.contract.checks.spec_errors import SpecError, job_spec_schema, parse_spec
from shoal_workers.contract.hugging_face import HF_TASK
from shoal_workers.contract.language_model import LM_TASK

SCHEMA = job_spec_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
BASE: dict[str, Any] = {"stop": {"steps": 2}, "data": {"corpus": "python-stdlib"}}
HOOK = {"url": "https://example.org/x", "secret": "file:a"}
GOOD: list[dict[str, Any]] = [
    {},
    {"stop": {"tokens": 5, "steps": None}},
    {"stop": {"epochs": 1}},
    {"stop": {"steps": 3.0}},
    {"name": "a.b_c-9", "project": "a-b", "user": "ada@example.org"},
    {"labels": {"lr": "3e-4"}, "annotations": {"why": "x\ny"}},
    {"optimizer": {"lr": 1, "fused": "auto"}},
    {"optimizer": {"name": "sgd", "args": {"momentum": 0.9}, "groups": [{"match": "*.bias", "lr_factor": 2}]}},
    {"optimizer": {"name": "torch.optim:Rprop", "args": {"etas": [0.5, 1.2]}, "weight_decay": 0}},
    {"optimizer": {"name": "muon", "beta2": 0.9, "groups": [{"match": "head.*", "muon": False}]}},
    {"optimizer": {"name": "my_module.Own", "args": {"size": 3}}},
    {"optimizer": {"args": {}, "groups": [{"match": "embed.*", "frozen": True}]}},
    {"schedule": {"name": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts", "args": {"T_0": 10}}},
    {"schedule": {"name": "my_module:Halved", "args": {"least": 0.1}, "warmup_steps": 3}},
    {"schedule": {"name": "cosine", "args": {}}},
    {"precision": "bf16", "compile": False},
    {"webhooks": [HOOK, {**HOOK, "url": "apprise:", "events": ["*", "incident.*", "job.state"]}]},
    {"webhooks": [{**HOOK, "secret": "env:SHOAL_WEBHOOK_SECRET_A", "url": "http://h:80?x#y"}]},
    {"secrets": {"HUB": {"file": "/run/hub"}, "B": {"env": "C", "file": None}}},
    {"code": {"env": {"A_1": ""}, "pip": ["einops==0.8.1", "torch[x] >=2"], "wheels": "/w"}},
    {"worker": {"cpus": 1.5, "gpus": 1, "gpu_type": "H100", "selector": {"a/b": "c"}}},
    {"parallelism": {"dp_shard": "auto", "shard": "full"}},
    {"task": "my.module:Task", "model": {"any": [1, None]}, "data": {}},
    {"task": HF_TASK, "model": {"config": {"model_type": "llama"}}},
    {"sweep": {"name": "lr"}, "finish_by": 4_000_000_000},
    {"data": {"paths": ["/a"], "corpus": None}},
]
BAD: list[dict[str, Any]] = [
    {"stop": {}},
    {"stop": {"steps": None}},
    {"stop": {"steps": 1, "tokens": 1}},
    {"stop": {"steps": True}},
    {"stop": {"steps": "5_0"}},
    {"stop": {"steps": 1.5}},
    {"stop": {"epochs": "1"}},
    {"schedule": {"name": "cosin"}},
    {"schedule": {"name": "cosine", "args": {"T_0": 10}}},
    {"schedule": {"name": "torch.optim.lr_scheduler.LambdaLR"}},
    {"schedule": {"name": "my_module:Halved", "min_lr_ratio": 0.1}},
    {"optimizer": {"name": "sgd", "beta1": 0.9}},
    {"optimizer": {"name": "sgd", "momentum": 0.9}},
    {"optimizer": {"name": "sgd", "args": {"betas": [0.9]}}},
    {"optimizer": {"name": "lion", "fused": "auto"}},
    {"optimizer": {"name": "adamm"}},
    {"optimizer": {"name": "torch.optim.LBFGS"}},
    {"optimizer": {"name": "torch.optim:Muon"}},
    {"optimizer": {"name": "my_module.Own", "eps": 1e-3}},
    {"optimizer": {"args": {"amsgrad": True}}},
    {"optimizer": {"groups": [{"match": "a"}]}},
    {"optimizer": {"groups": [{"match": "a", "frozen": True, "lr": 1}]}},
    {"optimizer": {"groups": [{"match": "a", "lr_factor": 2, "lr": 1}]}},
    {"optimizer": {"groups": [{"match": "a", "muon": True}]}},
    {"optimizer": {"lr": True}},
    {"optimizer": {"lr": "1e-3"}},
    {"optimizer": {"fused": "yes"}},
    {"compile": 1},
    {"compile": "yes"},
    {"deterministic": "true"},
    {"seed": False},
    {"priority": "3"},
    {"name": "-a"},
    {"name": 5},
    {"project": "Upper"},
    {"user": "a b"},
    {"task": "module"},
    {"task": "möd:T"},
    {"labels": {"a": 1}},
    {"labels": {"-a": "x"}},
    {"labels": {"a": "x" * 256}},
    {"annotations": {"a b": "x"}},
    {"worker": {"gpus": True}},
    {"worker": {"gpu_type": "H100"}},
    {"worker": {"gpu_type": "H100", "gpus": 0}},
    {"worker": {"selector": {"a b": "c"}}},
    {"secrets": {"HUB": {}}},
    {"secrets": {"HUB": {"file": "/a", "env": "B"}}},
    {"secrets": {"HUB": {"file": "a"}}},
    {"secrets": {"SHOAL_X": {"env": "B"}}},
    {"code": {"env": {"1A": "x"}}},
    {"code": {"env": {"A": 1}}},
    {"code": {"pip": ["--index-url x"]}},
    {"code": {"wheels": "/w"}},
    {"code": {"wheels": "w", "pip": ["a"]}},
    {"webhooks": [{**HOOK, "url": "ftp://x"}]},
    {"webhooks": [{**HOOK, "url": "https://u:p@x/"}]},
    {"webhooks": [{**HOOK, "events": ["Job.State"]}]},
    {"webhooks": [{**HOOK, "secret": "plain"}]},
    {"webhooks": [HOOK] * 9},
    {"webhooks": "x"},
    {"data": {}},
    {"data": {"corpus": "python-stdlib", "paths": ["/a"]}},
    {"data": {"corpus": "other"}},
    {"data": {"paths": [1]}},
    {"model": {"dim": "64"}},
    {"model": {"dim": True}},
    {"task": HF_TASK, "model": {}},
    {"task": HF_TASK, "model": {"config": {}}},
    {"checkpoint": {"every_s": "3"}},
    {"checkpoint": {"tensorboard": 1}},
    {"finish_by": True},
    {"sweep": {"name": "-"}},
    {"unknown": 1},
]
ODD = (True, False, 0, 1, 2, 2.0, 1.5, -1, "1", "yes", "", "auto", None, [], [1], {}, {"a": 1})
_ARITHMETIC = re.compile(
    r"multiple of|larger than|does not divide|divides|fits? |needs|cannot|is not a time|seconds since|layout|"
    r"is not the name|must be at least|Set |only|Use |without|Choose|no effect|every rank|workers"
)
"""Words of rules over several keys, and of formats that no schema knows."""


def refusal(spec: dict[str, Any]) -> str:
    try:
        parse_spec(spec)
    except SpecError as error:
        return str(error)
    return ""


def test_both_accept() -> None:
    def check(change: dict[str, Any]) -> None:
        spec = BASE | change
        assert refusal(spec) == "" and [error.message for error in VALIDATOR.iter_errors(spec)] == []

    assert failed_cases(check, GOOD) == {}


def test_both_refuse() -> None:
    assert [change for change in BAD if not refusal(BASE | change)] == [], "the server accepts it"
    assert [change for change in BAD if VALIDATOR.is_valid(BASE | change)] == [], "the schema accepts it"


def leaves(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a spec and of its objects."""
    for name, key in schema.get("properties", {}).items():
        yield (*path, name)
        for option in (key, *key.get("anyOf", ())):
            if "$ref" in option and len(path) < 3:
                yield from leaves(SCHEMA["$defs"][option["$ref"].rpartition("/")[2]], (*path, name))


def test_an_odd_value_of_any_key_is_refused_by_both_or_by_none() -> None:
    paths = sorted(set(leaves(SCHEMA)))
    differences = [difference for path in paths for value in ODD if (difference := _difference(path, value))]
    assert len(paths) > 150 and differences == []


def _difference(path: tuple[str, ...], value: object) -> str:
    """Who alone refuses a spec with this value, and why; empty if server and schema agree."""
    spec = copy.deepcopy(BASE)
    place = spec
    for name in path[:-1]:
        place = place.setdefault(name, {})
    place[path[-1]] = value
    message, error = refusal(spec), next(VALIDATOR.iter_errors(spec), None)
    if error is None and message and not _ARITHMETIC.search(message):
        return f"{'.'.join(path)}={value!r}: only the server refuses: {message}"
    if error is not None and not message:
        return f"{'.'.join(path)}={value!r}: only the schema refuses: {error.message}"
    return ""


STOP = {"stop": {"steps": 1}}
DATA = {"corpus": "python-stdlib"}


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
