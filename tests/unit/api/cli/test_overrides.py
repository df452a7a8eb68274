import pytest

from shoal_api.cli.errors import CliError
from shoal_api.cli.spec_file import apply_overrides


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
