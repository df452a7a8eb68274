"""Files and changes on the command line become specs, and references become jobs."""

from pathlib import Path

import pytest

from shoal_api.cli.session import CliError, match_job
from shoal_api.cli.spec_file import apply_overrides, decode_spec, load_spec
from shoal_service.views import JobSummary
from shoal_workers.contract.job import JobState


def test_yaml_and_json_are_both_read() -> None:
    assert decode_spec("stop: {steps: 1}", "x") == decode_spec('{"stop": {"steps": 1}}', "x") == {"stop": {"steps": 1}}


def test_broken_yaml_names_the_line() -> None:
    with pytest.raises(CliError) as error:
        decode_spec("a: 1\n b: {", "x")
    assert "(line 2)" in error.value.details[0]


def test_a_duplicate_key_names_its_line() -> None:
    with pytest.raises(CliError) as error:
        decode_spec("optimizer:\n  lr: 0.1\n  lr: 0.2\n", "x")
    assert error.value.details == ("optimizer.lr: the key is given twice (line 3).",)


@pytest.mark.parametrize("text", ["", "- 1", "7"])
def test_a_document_that_is_not_a_mapping_is_refused(text: str) -> None:
    with pytest.raises(CliError, match="not a job spec"):
        decode_spec(text, "x")


def test_the_working_directory_is_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("code: {working_dir: src}")
    assert load_spec(str(path))["code"]["working_dir"] == str(tmp_path / "src")


@pytest.mark.parametrize("name", ["train.py", "run.sh", "train.ipynb"])
def test_a_program_is_refused_as_a_spec_with_the_door_for_programs(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x = 1\n")
    with pytest.raises(CliError) as refused:
        load_spec(str(tmp_path / name))
    assert "YAML" not in refused.value.message and "docs/porting.md" in refused.value.hint


def test_a_folder_is_refused_as_a_spec(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot read"):
        load_spec(str(tmp_path))


def test_values_are_yaml_and_sections_are_created() -> None:
    spec = apply_overrides({"stop": {"steps": 1}}, ["stop.steps=7", "a.b.c=[1, x]", "flag=true", "none=null"])
    assert spec == {"stop": {"steps": 7}, "a": {"b": {"c": [1, "x"]}}, "flag": True, "none": None}


def test_the_original_is_not_touched() -> None:
    original = {"stop": {"steps": 1}}
    apply_overrides(original, ["stop.steps=7"])
    assert original == {"stop": {"steps": 1}}


def test_a_value_may_contain_an_equals_sign() -> None:
    assert apply_overrides({}, ["a=b=c"]) == {"a": "b=c"}


@pytest.mark.parametrize("wrong", ["stop.steps", "=3", "a..b=1", "a=[1", "a={b: 1, b: 2}"])
def test_text_that_is_not_an_assignment_is_refused(wrong: str) -> None:
    with pytest.raises(CliError):
        apply_overrides({}, [wrong])


def test_a_path_through_a_value_is_refused_with_the_path() -> None:
    with pytest.raises(CliError, match="parallelism is 'auto'"):
        apply_overrides({"parallelism": "auto"}, ["parallelism.dp_shard=2"])


def test_variables_and_labels_are_texts_as_they_stand() -> None:
    given = ["code.env.EPOCHS=4", "code.env.RATE=1e-3", "code.env.NAME='4'", "labels.run=07", "stop.steps=7"]
    assert apply_overrides({}, given) == {
        "code": {"env": {"EPOCHS": "4", "RATE": "1e-3", "NAME": "4"}},
        "labels": {"run": "07"},
        "stop": {"steps": 7},
    }


def job(job_id: str, name: str, created_at: float = 0.0, state: JobState = JobState.RUNNING) -> JobSummary:
    return JobSummary(id=job_id, name=name, state=state, created_at=created_at, updated_at=0)


JOBS = [job("abc1", "one"), job("abd2", "two"), job("abd2x", "abc1"), job("zz", "two", 5.0)]


def test_an_exact_id_wins_over_a_name_and_a_beginning() -> None:
    assert match_job("abc1", JOBS).id == "abc1"
    assert match_job("abd2", JOBS).id == "abd2"


def test_a_unique_name_or_beginning_is_enough() -> None:
    assert match_job("one", JOBS).id == "abc1"
    assert match_job("z", JOBS).id == "zz"


def test_an_ambiguous_reference_lists_the_newest_first() -> None:
    with pytest.raises(CliError) as caught:
        match_job("two", JOBS)
    assert caught.value.exit_code == 2
    assert caught.value.details[0].startswith("zz")


def test_an_unknown_reference_suggests_the_nearest_name() -> None:
    with pytest.raises(CliError) as caught:
        match_job("onne", JOBS)
    assert caught.value.exit_code == 4
    assert "'one'" in caught.value.hint


def test_an_empty_reference_matches_no_job() -> None:
    with pytest.raises(CliError):
        match_job("", JOBS)


def test_a_job_that_goes_on_wins_over_ended_ones_of_the_same_name() -> None:
    ended = [job("e1", "lm", 1.0, JobState.SUCCEEDED), job("e2", "lm", 9.0, JobState.FAILED)]
    assert match_job("lm", [*ended, job("r1", "lm", 5.0)]).id == "r1"
    with pytest.raises(CliError):
        match_job("lm", ended)
    with pytest.raises(CliError):
        match_job("lm", [*ended, job("r1", "lm", 5.0), job("r2", "lm", 6.0, JobState.QUEUED)])
