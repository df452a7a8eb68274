"""The messages of refused specs, and the places that a spec may name. Every input raises SpecError or is accepted."""

import json
import pickle
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_workers.contract.checks.places import EVERYWHERE, AllowedPlaces, check_places
from shoal_workers.contract.checks.spec_errors import (
    _FOREIGN_KEYS,
    MAX_PROBLEMS,
    SpecError,
    SpecProblem,
    parse_spec,
)
from shoal_workers.contract.hugging_face import HF_TASK
from shoal_workers.contract.json_values import MAX_DEPTH, MAX_VALUES
from shoal_workers.contract.spec import JobSpec

LEAST: dict[str, Any] = {"stop": {"steps": 5}, "data": {"corpus": "python-stdlib"}}


def _problems(document: Any) -> tuple[SpecProblem, ...]:
    with pytest.raises(SpecError) as caught:
        parse_spec(document)
    return caught.value.problems


@pytest.mark.parametrize(
    ("change", "path", "near"),
    [
        ({"optimizr": {}}, "optimizr", "optimizer"),
        ({"batch": {"global_sise": 8}}, "batch.global_sise", "global_size"),
        ({"elasticity": {"max_worker": 8}}, "elasticity.max_worker", "max_workers"),
        ({"parallelism": {"dp_shards": 8}}, "parallelism.dp_shards", "dp_shard"),
        ({"model": {"n_layers": 8}}, "model.n_layers", "num_layers"),
        ({"data": {"corpus": "python-stdlib", "validation": 0.1}}, "data.validation", "validation_fraction"),
        ({"stop": {"step": 8}}, "stop.step", "steps"),
        ({"worker": {"memory": 8}}, "worker.memory", "memory_gib"),
    ],
)
def test_an_unknown_key_names_its_path_and_the_nearest_valid_one(change: dict[str, Any], path: str, near: str) -> None:
    [problem] = _problems({**LEAST, **change})
    assert problem.path == path
    assert f"Did you mean {near!r}?" in problem.message
    assert "Valid keys here: " in problem.message


def test_a_key_that_looks_like_a_class_name_keeps_its_path() -> None:
    [problem] = _problems({**LEAST, "BatchSpec": {}})
    assert (problem.path, problem.message[:24]) == ("BatchSpec", "unknown key 'BatchSpec'.")


@pytest.mark.parametrize("key", ["command", "cmd", "entrypoint", "program", "train_loop_per_worker"])
def test_a_key_of_another_system_for_a_program_leads_to_scripts_and_to_nothing_else(key: str) -> None:
    [problem] = _problems({"name": "mine", key: "python train.py", "image": "torch"})
    assert problem.path == key
    assert "shoal submit train.py" in problem.message and "Did you mean" not in problem.message


@pytest.mark.parametrize(
    ("key", "way_out"),
    [
        ("num_workers", "elasticity"),
        ("replicas", "elasticity"),
        ("gpus", "worker"),
        ("resources", "worker"),
        ("runtime_env", "code"),
        ("max_steps", "stop"),
        ("learning_rate", "optimizer.lr"),
        ("batch_size", "batch"),
    ],
)
def test_a_key_of_another_system_names_the_key_of_this_one(key: str, way_out: str) -> None:
    [problem] = _problems({**LEAST, key: 4})
    assert problem.path == key
    assert way_out in problem.message and "Did you mean" not in problem.message
    beside_a_program = _problems({"entrypoint": "train.py", key: 4})
    assert [one.path for one in beside_a_program] == ["entrypoint", key]


def test_every_example_in_the_words_about_keys_of_other_systems_is_accepted() -> None:
    for key, words in _FOREIGN_KEYS.items():
        for text in re.findall(r"\{\".*\}", words):
            example = json.loads(text)
            assert parse_spec(example if "script" in example else {**LEAST, **example}), key


def test_a_foreign_name_inside_of_a_section_gets_the_keys_of_the_section() -> None:
    [problem] = _problems({**LEAST, "batch": {"batch_size": 4}})
    assert "Valid keys here: global_size, micro_size" in problem.message


@pytest.mark.parametrize(
    ("parallelism", "path", "message"),
    [
        ({"tp": 2}, "parallelism", "parallelism needs a multiple of tp 2 = 2 workers, but elasticity allows "),
        ({"tpp": 2}, "parallelism.tpp", "unknown key 'tpp'. Did you mean 'tp'?"),
        ("best", "parallelism", "must be 'auto' (it is 'best')."),
        ({"dp_shard": "x"}, "parallelism.dp_shard", "must be a whole number or 'auto' (it is 'x')."),
        ({"dp_shard": {}}, "parallelism.dp_shard", "must be a whole number or 'auto' (it is {})."),
        (3, "parallelism", "must be 'auto' (it is 3)."),
        ({"tp": "x"}, "parallelism.tp", "must be a whole number (it is 'x')."),
    ],
)
def test_only_the_branch_that_was_meant_is_reported(parallelism: Any, path: str, message: str) -> None:
    [problem] = _problems({**LEAST, "parallelism": parallelism})
    assert problem.path == path
    assert problem.message.startswith(message)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"data": LEAST["data"]}, 'stop: this key is required, for example stop: {"steps": 1000}.'),
        ({**LEAST, "stop": 5}, "stop: must be an object with the keys steps, tokens, epochs (it is 5)."),
        ({**LEAST, "model": [1]}, "model: must be an object (it is [1])."),
        ({**LEAST, "data": {"paths": "a.txt"}}, "data.paths: must be a list (it is 'a.txt')."),
        ({**LEAST, "data": {"paths": ["a", 3]}}, "data.paths.1: must be text (it is 3)."),
        ({**LEAST, "precision": "fp64"}, "precision: must be 'fp32', 'bf16' or 'fp16' (it is 'fp64')."),
        ({**LEAST, "worker": {"gpus": 2}}, "worker.gpus: must be less than or equal to 1 (it is 2)."),
        ({**LEAST, "deterministic": "maybe"}, "deterministic: must be true or false (it is 'maybe')."),
        ([], "a spec is an object (keys with values); this is []."),
        (None, "a spec is an object (keys with values); this is None."),
        ({**LEAST, 3: 4}, "a key must be plain text; one is 3."),
        ({**LEAST, "optimizer": {"lr": float("nan")}}, "optimizer.lr: nan is not a finite number."),
        ({**LEAST, "seed": 10**5000}, "seed: the number does not fit into 64 bits."),
        ({**LEAST, "model": {"x": ["a\0b"]}}, "model.x.0: the text 'a\\x00b' contains a null character."),
        ({**LEAST, "model": {"x": "\ud800"}}, "is not valid Unicode"),
        ({**LEAST, "model": {"x": {1, 2}}}, "model.x: {1, 2} is a set; a spec holds text,"),
    ],
)
def test_the_message_reads_well(document: Any, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(document)
    assert expected in str(caught.value)
    assert len(caught.value.problems) == 1


def test_all_problems_are_reported_together() -> None:
    paths = {p.path for p in _problems({"batch": {"micro_size": 0}, "seed": -1, "model": {"dim": "x"}, "data": {}})}
    assert paths == {"batch.micro_size", "seed", "model.dim", "data", "stop"}


def test_a_document_that_contains_itself_or_is_too_deep_or_too_large_is_refused() -> None:
    itself: dict[str, Any] = {**LEAST}
    itself["model"] = itself
    assert "nested deeper" in _problems(itself)[0].message
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    assert f"nested deeper than {MAX_DEPTH} levels" in _problems({**LEAST, "model": {"x": deep}})[0].message
    assert f"more than {MAX_VALUES:,} values" in _problems({**LEAST, "model": {"x": [0] * MAX_VALUES}})[0].message
    while deep:  # else the interpreter frees it recursively
        deep = deep[0]


def test_the_number_of_problems_and_the_length_of_each_are_bounded() -> None:
    problems = _problems({**LEAST, **{f"key{n}" * 1000: n for n in range(1000)}})
    assert len(problems) == MAX_PROBLEMS
    assert all(len(p.path) <= 200 and len(p.message) < 600 for p in problems)


def test_another_task_has_its_own_model_and_data() -> None:
    spec = parse_spec({"stop": {"steps": 1}, "task": "shapes:Shapes", "model": {"anything": [1, {"a": None}]}})
    assert spec.model == {"anything": [1, {"a": None}]}


def test_the_error_survives_pickling() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({})
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.problems, str(again)) == (caught.value.problems, str(caught.value))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(4300, 5000).map(lambda digits: 10**digits)
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.dates()
    | st.just("\0")
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner), max_leaves=20
)


@settings(max_examples=30)
@given(ANYTHING)
def test_any_document_gives_a_spec_or_a_spec_error(document: Any) -> None:
    _gives_spec_or_spec_error(document)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(sorted(JobSpec.model_fields)), ANYTHING))
def test_any_values_under_valid_keys_give_a_spec_or_a_spec_error(document: dict[str, Any]) -> None:
    _gives_spec_or_spec_error({**LEAST, **document})


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(set(JobSpec.model_fields) - {"name", "task", "seed", "priority", "deterministic"})),
    st.data(),
)
def test_any_values_in_any_section_give_a_spec_or_a_spec_error(section: str, data: st.DataObject) -> None:
    annotation = JobSpec.model_fields[section].annotation
    keys = sorted(getattr(annotation, "model_fields", {"dp_shard": None, "tp": None, "paths": None, "dim": None}))
    inner = data.draw(st.dictionaries(st.sampled_from(keys) | st.text(), ANYTHING))
    _gives_spec_or_spec_error({**LEAST, section: inner})


def _gives_spec_or_spec_error(document: Any) -> None:
    try:
        spec = parse_spec(document)
    except SpecError as error:
        assert error.problems
        assert str(error)
    else:
        assert parse_spec(spec.model_dump(mode="json")) == spec


ROOTS = AllowedPlaces(
    paths=("/data", "/scratch/shoal"),
    protocols=frozenset({"file", "s3", "https://data.example.com"}),
    closed=("/data/state",),
    opened=("/data/state/ck",),
)
TEXT = {"data": {"paths": ["/data/a/*.txt"]}, "stop": {"steps": 1}}
HF = {"task": HF_TASK, "stop": {"steps": 1}}


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("/data", ""),
        ("/data/a/../b", ""),
        ("file:///scratch/shoal/x", ""),
        ("s3://bucket/key", ""),
        ("S3://bucket/key", ""),
        ("texts/*.txt", ""),
        ("/data/state/ck/job", ""),
        ("/database", "SHOAL_ALLOWED_PATHS: /data, /scratch/shoal"),
        ("/data/../etc", "SHOAL_ALLOWED_PATHS"),
        ("/data/*/../../etc/*", "SHOAL_ALLOWED_PATHS"),
        ("../outside", "SHOAL_ALLOWED_PATHS"),
        ("~/texts", "SHOAL_ALLOWED_PATHS"),
        ("file:///etc", "SHOAL_ALLOWED_PATHS"),
        ("/data/state/shoal.db", "the server's own directory"),
        ("/data/state", "the server's own directory"),
        ("gs://bucket/key", "the protocol gs is not allowed"),
        ("http://169.254.169.254/latest", "the protocol http is not allowed"),
        ("https://data.example.com/a.jsonl", ""),
        ("https://DATA.example.com/a.jsonl", ""),
        ("http://data.example.com/a.jsonl", "the protocol http is not allowed"),
        ("https://data.example.com:8443/a.jsonl", "the protocol https is not allowed"),
        ("https://data.example.com@evil.example.com/a.jsonl", "the protocol https is not allowed"),
        ("https://data.example.com.evil.example.com/a.jsonl", "the protocol https is not allowed"),
        ("simplecache::s3://bucket/key", "the protocol simplecache is not allowed"),
        ("zip://a.txt::/etc/x.zip", "the protocol zip is not allowed"),
    ],
)
def test_a_place_is_below_a_root_or_has_an_allowed_protocol(place: str, words: str) -> None:
    found = ROOTS.refusal(place)
    assert words in found if words else found == ""


def test_links_are_followed_where_they_are_known() -> None:
    assert "SHOAL_ALLOWED_PATHS" in ROOTS.refusal("/data/link", lambda path: "/etc/passwd")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"checkpoint": {"url": "/etc/x"}}, "checkpoint.url"),
        ({"code": {"working_dir": "/home"}}, "code.working_dir"),
        ({"secrets": {"A": {"file": "/etc/shadow"}}}, "secrets.A.file"),
        ({"data": {"paths": ["/data/a", "/etc/passwd"]}}, "data.paths"),
        (
            {"data": {"sources": [{"path": "/data/a", "weight": 1}, {"path": "/etc/passwd", "weight": 1}]}},
            "data.sources[1].path",
        ),
        ({"data": {"paths": ["/data/a"], "cache_dir": "/etc/x"}}, "data.cache_dir"),
        ({"data": {"paths": ["/data/a"], "tokenizer": "/etc/x"}}, "data.tokenizer"),
        ({**HF, "model": {"path": "/etc/x"}}, "model.path"),
    ],
)
def test_every_place_of_a_spec_is_checked(change: dict[str, Any], path: str) -> None:
    spec = parse_spec(TEXT | change)
    with pytest.raises(SpecError) as refused:
        check_places(spec, ROOTS)
    assert [problem.path for problem in refused.value.problems] == [path]
    check_places(spec, EVERYWHERE)


def test_a_packed_directory_does_not_contain_the_servers_own() -> None:
    spec = parse_spec(TEXT | {"code": {"working_dir": "/data"}})
    with pytest.raises(SpecError, match="it contains the server's own directory"):
        check_places(spec, ROOTS)


def test_the_strings_of_a_users_task_are_its_own() -> None:
    check_places(parse_spec({"task": "mine:Task", "data": {"paths": ["/etc"]}, "stop": {"steps": 1}}), ROOTS)
