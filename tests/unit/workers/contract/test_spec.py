"""Sections of a spec, those of code and webhooks among them: what they accept, and what their messages say."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.spec import KEYS_OF_TASKS, JobSpec, Precision
from shoal_workers.contract.webhooks import WebhookSpec

LEAST: dict[str, Any] = {"stop": {"steps": 5}, "data": {"corpus": "python-stdlib"}}


def test_the_least_spec_trains_the_built_in_task_on_one_worker() -> None:
    spec = parse_spec(LEAST)
    assert spec.task == "shoal_workers.tasks.lm:LanguageModel"
    assert (spec.elasticity.min_workers, spec.elasticity.max_workers) == (1, 1)
    assert spec.batch.num_micro_batches == 8


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"project": "My Lab"}, "project 'My Lab' is not valid: use at most 63 lower-case letters"),
        (
            {"finish_by": "tomorrow"},
            "finish_by: 'tomorrow' is not a time: write it as in \"2030-01-31T18:00:00+00:00\"",
        ),
        ({"finish_by": "2030-01-31T18:00:00"}, 'has no time zone: add it, for example "Z" for UTC'),
        ({"finish_by": -5}, "finish_by: -5 is not a number of seconds since 1970."),
        ({"finish_by": True}, "finish_by: True is not a number of seconds since 1970."),
        ({"capacity": "cheap"}, "capacity: must be 'any', 'spot' or 'on_demand'"),
        ({"placement": "near"}, "placement: must be 'pack' or 'spread'"),
        ({"worker": {"gpu_type": "H100"}}, "worker.gpu_type is H100, but worker.gpus is 0. Set worker.gpus to 1."),
        ({"worker": {"selector": {"a b": "c"}}}, "worker.selector: 'a b' is not valid in a label of a node"),
        ({"annotations": {"a b": "x"}}, "annotation 'a b': a name has at most 63"),
        ({"annotations": {"why": "\a"}}, "annotation 'why': a value has at most 4096 characters of text"),
        ({"worker": {"selector": {f"k{i}": "v" for i in range(17)}}}, "17 labels are too many: use at most 16."),
        (
            {"batch": {"global_size": 10, "micro_size": 4}},
            "batch.global_size 10 is not a multiple of batch.micro_size 4: 10 = 2 x 4 + 2. Set global_size to 8 or",
        ),
        ({"batch": {"global_size": 3, "micro_size": 4}}, "3 = 0 x 4 + 3. Set global_size to 4, or"),
        (
            {"elasticity": {"max_workers": 30}, "model": {"dropout": 0.1}},
            "elasticity.max_workers 30 is more than the 8 micro-batches a step (batch.global_size 32 / "
            "batch.micro_size 4): 22 workers would have nothing to do. Lower max_workers to 8,",
        ),
        (
            {"elasticity": {"min_workers": 3}},
            "min_workers 3 is larger than elasticity.max_workers 1. Set max_workers to",
        ),
        (
            {"parallelism": {"dp_shard": 2}},
            "dp_shard 2 = 2 workers, but elasticity allows 1 to 1 workers. Set max_workers to 2, or dp_shard to",
        ),
        (
            {"parallelism": {"tp": 2}},
            "a multiple of tp 2 = 2 workers, but elasticity allows 1 to 1",
        ),
        ({"stop": {}}, "stop must contain exactly one of steps, tokens and epochs; it has none."),
        ({"stop": {"steps": 1, "epochs": 2}}, "it has steps and epochs."),
        (
            {"model": {"dim": 100, "num_heads": 8}},
            "model.dim 100 is not a multiple of model.num_heads 8: 100 = 12 x 8 + 4.",
        ),
        ({"model": {"dim": 24, "num_heads": 8}}, "model.dim / model.num_heads = 3 is odd; RoPE rotates pairs."),
        ({"model": {"num_kv_heads": 3}}, "model.num_kv_heads 3 does not divide model.num_heads 8."),
        ({"data": {}}, "data must contain exactly one of corpus, paths and sources"),
        ({"data": {"corpus": "wikipedia"}}, "data.corpus 'wikipedia' is not known; the only named corpus is"),
        ({"name": "Not A Label"}, "name 'Not A Label' is not valid: use at most 63 letters, digits, and inner"),
        ({"name": "trailing\n"}, "use at most 63 letters"),
        ({"task": "no-colon"}, "task 'no-colon' must have the form \"module:Name\""),
    ],
)
def test_a_cross_field_error_has_the_arithmetic_and_the_way_out(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({**LEAST, **change})
    assert expected in str(caught.value)
    assert len(caught.value.problems) == 1


def _specs() -> st.SearchStrategy[dict[str, Any]]:
    micro = st.integers(1, 16)
    return st.builds(
        lambda micro, num, workers, rest: {
            **LEAST,
            **rest,
            "batch": {"global_size": micro * num, "micro_size": micro},
            "elasticity": {"max_workers": min(workers, num)},
        },
        micro,
        st.integers(1, 64),
        st.integers(1, 64),
        st.fixed_dictionaries(
            {},
            optional={
                "precision": st.sampled_from(["fp32", "bf16"]),
                "parallelism": st.sampled_from(["auto", {}, {"dp_shard": "auto"}]),
                "optimizer": st.fixed_dictionaries({"lr": st.floats(1e-6, 1.0), "clip_norm": st.none() | st.just(0.5)}),
                "stop": st.sampled_from([{"steps": 3}, {"tokens": 10**9}, {"epochs": 0.5}]),
                "checkpoint": st.fixed_dictionaries({"every_s": st.none() | st.floats(0.1, 1e6)}),
                "seed": st.integers(0, 2**32 - 1),
                "code": st.just({"working_dir": "."}),
            },
        ),
    )


@given(_specs())
def test_a_spec_survives_json(document: dict[str, Any]) -> None:
    spec = parse_spec(document)
    assert parse_spec(spec.model_dump(mode="json")) == spec
    assert parse_spec(json.loads(spec.model_dump_json())) == spec
    assert TypeAdapter(JobSpec).validate_json(spec.model_dump_json()) == spec


def test_the_json_schema_builds_and_refuses_unknown_keys_at_every_depth() -> None:
    schema = JobSpec.model_json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == set(JobSpec.model_fields)
    objects = [schema, *(d for d in schema["$defs"].values() if d["type"] == "object")]
    assert all(o["additionalProperties"] is False for o in objects)
    assert len(objects) > 10
    undocumented = [name for o in objects for name, field in o["properties"].items() if not _documented(field, schema)]
    assert undocumented == []


def _documented(field: dict[str, Any], schema: dict[str, Any]) -> bool:
    options = [field, *field.get("anyOf", ())]
    targets = [schema["$defs"][option["$ref"].rpartition("/")[2]] for option in options if "$ref" in option]
    return "description" in field or any("description" in target for target in targets)


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_spec(LEAST).seed = 3  # type: ignore[misc]


def _sections(document: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        yield f"{path}{key}", value
        if isinstance(value, dict):
            yield from _sections(value, f"{path}{key}.")


def test_a_spec_without_readers_is_written_as_before_there_were_any() -> None:
    """So an older release reads it, and one of an older release is equal to it."""
    plain = JobSpec.model_validate({**LEAST, "batch": {"global_size": 8, "micro_size": 2}})
    assert plain.model_dump(mode="json")["batch"] == {"global_size": 8, "micro_size": 2}
    assert (plain.batch.num_workers, plain.batch.prefetch_factor) == (0, 2)
    ahead = JobSpec.model_validate({**LEAST, "batch": {"num_workers": 3, "prefetch_factor": 4}})
    assert JobSpec.model_validate_json(ahead.model_dump_json()).batch == ahead.batch


def test_every_default_is_itself_valid_when_written_out() -> None:
    spec = parse_spec(LEAST)
    written = spec.model_dump(mode="json")
    assert len(list(_sections(written))) > 50
    assert parse_spec(written) == spec


def test_a_job_says_where_and_by_when() -> None:
    spec = parse_spec(
        {
            **LEAST,
            "project": "vision",
            "finish_by": "2030-01-31T18:00:00Z",
            "capacity": "spot",
            "placement": "spread",
            "worker": {"gpus": 1, "gpu_type": "H100", "selector": {"zone": "a"}},
        }
    )
    assert spec.finish_by == parse_spec({**LEAST, "finish_by": 1896112800}).finish_by == 1896112800.0
    assert parse_spec({**LEAST, "finish_by": "2030-01-31T19:00:00+01:00"}).finish_by == spec.finish_by
    assert spec.worker.node_labels == {"zone": "a", "ray.io/accelerator-type": "H100"}
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert (parse_spec(LEAST).project, parse_spec(LEAST).finish_by, parse_spec(LEAST).capacity) == (
        "default",
        None,
        "any",
    )


@pytest.mark.parametrize("name", ["a", "Llama-3.1_8B", "x" * 63])
def test_a_name_may_have_capitals_dots_and_underscores(name: str) -> None:
    assert JobSpec.model_validate({"name": name, "stop": {"steps": 1}}).name == name


@pytest.mark.parametrize("name", ["", ".", "-a", "a.", "_a", "a/b", "..", "a b", "x" * 64, "a\n", "\u00e4"])
def test_a_name_that_no_label_could_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        JobSpec.model_validate({"name": name, "stop": {"steps": 1}})


def test_the_document_of_a_script_has_no_keys_of_tasks_and_can_be_submitted_again() -> None:
    script = parse_spec({"script": {"file": "train.py", "args": ["--lr", "1"]}, "priority": 3})
    document = script.model_dump(mode="json")
    assert [key for key in KEYS_OF_TASKS if key in document] == []
    assert parse_spec(document) == script == JobSpec.model_validate_json(script.model_dump_json())
    task = parse_spec({"stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}})
    assert {*KEYS_OF_TASKS} - {"module_precision", "fp8", "islands"} <= task.model_dump().keys()


def test_module_precision_is_written_only_where_it_is_set_and_survives_json() -> None:
    spec = parse_spec(LEAST | {"precision": "bf16", "module_precision": {"*norm*": "fp32"}})
    assert spec.module_precision == {"*norm*": Precision.FP32}
    assert parse_spec(spec.model_dump(mode="json")) == spec == JobSpec.model_validate_json(spec.model_dump_json())
    assert "module_precision" not in parse_spec(LEAST).model_dump()
    with pytest.raises(SpecError, match="module_precision fp8_e4m3 is not a type of whole modules"):
        parse_spec(LEAST | {"module_precision": {"*": "fp8_e4m3"}})


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


HOOK = {"url": "https://example.org:8443/hooks/token?x=1", "secret": "file:team-a"}


def _spec(*hooks: dict[str, Any]) -> JobSpec:
    return parse_spec({"stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}, "webhooks": list(hooks)})


def test_a_hook_needs_a_url_and_a_secret() -> None:
    [hook] = _spec(HOOK).webhooks
    assert hook.events == ("job.state", "incident.*", "alert.*")
    assert hook.receiver == "https://example.org:8443", "without the path, which may contain a token"


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"url": "ftp://example.org/"}, "webhooks.0.url", "http:// or https://"),
        ({"url": "file:///etc/passwd"}, "webhooks.0.url", "http:// or https://"),
        ({"url": "http:///path"}, "webhooks.0.url", "with a host"),
        ({"url": "http://host:99999/"}, "webhooks.0.url", "is not a valid URL"),
        ({"url": "http://host/a b"}, "webhooks.0.url", "no spaces"),
        ({"url": "http://host/\r\nX: y"}, "webhooks.0.url", "is not a valid URL"),
        ({"url": "http://ada:pw@host/"}, "webhooks.0.url", "user name or a password"),
        ({"events": []}, "webhooks.0.events", "at least 1"),
        ({"events": ["Job State"]}, "webhooks.0.events", "must be a type of event"),
        ({"secret": "s3cret-itself"}, "webhooks.0.secret", "must be env:SHOAL_WEBHOOK_SECRET_NAME or file:NAME"),
        ({"secret": "env:HOME"}, "webhooks.0.secret", "must be env:"),
        ({"secret": "file:../shoal.db"}, "webhooks.0.secret", "file:NAME"),
        ({"evnts": []}, "webhooks.0.evnts", "Did you mean 'events'?"),
    ],
)
def test_each_mistake_is_named_with_its_place(change: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        _spec({**HOOK, **change})
    [problem] = error.value.problems
    assert problem.path == path and words in problem.message


def test_a_job_has_at_most_eight() -> None:
    assert len(_spec(*[HOOK] * 8).webhooks) == 8
    with pytest.raises(SpecError, match="at most 8"):
        _spec(*[HOOK] * 9)


def test_hooks_survive_json() -> None:
    spec = _spec(HOOK)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.webhooks == (WebhookSpec.model_validate(HOOK),)
