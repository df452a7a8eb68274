from __future__ import annotations

import json

import pytest

from shoal_service.control.spec_io import MAX_SPEC_BYTES, SpecFormat, parse_text
from shoal_workers.contract.checks.spec_errors import SpecError

GOOD = """\
name: fish
stop: {steps: 10}
data:
  corpus: python-stdlib
optimizer:
  lr: 3e-4
"""


def _problems(text: str, spec_format: SpecFormat = SpecFormat.YAML) -> str:
    with pytest.raises(SpecError) as error:
        parse_text(text, spec_format)
    return str(error.value)


def test_yaml_and_json_give_the_same_spec() -> None:
    document = {
        "name": "fish",
        "stop": {"steps": 10},
        "data": {"corpus": "python-stdlib"},
        "optimizer": {"lr": 3e-4},
    }
    spec = parse_text(GOOD, SpecFormat.YAML)
    assert spec == parse_text(json.dumps(document), SpecFormat.JSON)
    assert spec == parse_text(json.dumps(document), SpecFormat.YAML)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("application/json; charset=utf-8", SpecFormat.JSON),
        ("job.json", SpecFormat.JSON),
        ("application/yaml", SpecFormat.YAML),
        ("job.yml", SpecFormat.YAML),
        ("", SpecFormat.YAML),
    ],
)
def test_the_format_follows_from_a_media_type_or_a_file_name(hint: str, expected: SpecFormat) -> None:
    assert SpecFormat.of(hint) is expected


def test_a_wrong_value_is_named_with_its_line() -> None:
    assert "optimizer.lr" in _problems(GOOD.replace("3e-4", "-1"))
    assert "(line 6)" in _problems(GOOD.replace("3e-4", "-1"))


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_one() -> None:
    message = _problems(GOOD.replace("  lr", "  weight_decya"))
    assert "unknown key 'weight_decya'. Did you mean 'weight_decay'?" in message
    assert "(line 6)" in message


def test_a_problem_of_the_whole_document_has_no_line() -> None:
    assert "line" not in _problems("name: fish\ndata: {corpus: python-stdlib}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "(line"),
        ("a: 1\nb: 2\na: 3\n", "a: the key is given twice (line 3)"),
        ("x: {a: 1, a: 2}", "x.a: the key is given twice (line 1)"),
        ("a: &x [1]\nb: *x\n", "aliases (*name) are not accepted: write the values out (line 2)"),
        ("yes: 1", "'yes' is not a string: put it in quotes (line 1)"),
        ("? [1, 2]\n: 3", "is not a string"),
        ("when: !!timestamp 2020-01-01", "when: date '2020-01-01': put it in quotes"),
        ("raw: !!binary aGk=", "raw: bytes"),
        ("a: .nan", "a: nan is not a finite number"),
        ("a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
        ('a: "\\0"', "NUL"),
        ("a: " + "[" * 1000, "nested deeper than 64"),
        ("a: 1\n---\nb: 2\n", "found another document (line 2)"),
        ("\x01", "Not valid YAML"),
        ("", "this is None"),
        ("just text", "a spec is an object"),
    ],
)
def test_hostile_yaml_is_refused(text: str, message: str) -> None:
    assert message in _problems(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b" 2}', "(line 2, column 6)"),
        ('{"x": {"a": 1, "a": 2}}', "the key 'a' is given twice"),
        ('{"a": NaN}', "a: nan is not a finite number"),
        ('{"a": 1e999}', "a: inf is not a finite number"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"a": ' + "[" * 100_000, "nested deeper than 64"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested deeper than 64"),
        ('{"a": ' + "9" * 10_000 + "}", "Not valid JSON"),
        ('{"a": ' + "9" * 400 + "}", "1024 bits"),
    ],
)
def test_hostile_json_is_refused(text: str, message: str) -> None:
    assert message in _problems(text, SpecFormat.JSON)


def test_a_bomb_of_aliases_is_refused_before_it_grows() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    assert "aliases" in _problems("\n".join(lines))


def test_a_document_over_the_limit_is_refused() -> None:
    assert f"at most {MAX_SPEC_BYTES}" in _problems("a: " + "ü" * (MAX_SPEC_BYTES // 2))


def test_text_that_cannot_be_encoded_is_refused() -> None:
    assert "surrogate" in _problems("a: \ud800")
