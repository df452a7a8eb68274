from pathlib import Path

import pytest

from shoal_api.cli.errors import CliError
from shoal_api.cli.spec_file import decode_spec, load_spec


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
