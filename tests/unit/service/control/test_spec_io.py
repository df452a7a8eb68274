"""What comes in: specs, submissions, measurements of hardware, and secrets and signatures of webhooks."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from shoal_service.control.planning import profile_of
from shoal_service.control.spec_io import MAX_SPEC_BYTES, SpecFormat, decode, parse_text
from shoal_service.control.submission import check_deadline
from shoal_service.control.webhooks import (
    JobFacts,
    Secrets,
    SecretUnusable,
    make_body,
    make_headers,
    message_id,
    signature,
)
from shoal_service.core.events.base import Severity
from shoal_service.planner.gpus import PROFILES
from shoal_service.views import EventView
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.spec import JobSpec, Precision

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
        ("a: !!int ''", "Not valid YAML"),
        ("a: !!int 1:30", "Not valid YAML: not a number (line 1)"),
        ("a: !!bool maybe", "Not valid YAML"),
        ("a: !!timestamp never", "Not valid YAML"),
        ("a: [" + "0," * 400_001 + "]", "more than 200,000 values"),
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


def _megabyte(entry: str, start: str = "", end: str = "") -> str:
    """Numbered entries that fill a document of nearly the largest size."""
    num = (MAX_SPEC_BYTES - 1000) // len(entry.format(0) + "123456")
    return start + "".join(entry.format(i) for i in range(num)) + end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "spec_format"),
    [
        (_megabyte('"k{}":1,', '{"stop":{"steps":1},', '"z":1}'), SpecFormat.JSON),
        (_megabyte('"k{}":1,', '{"model":{', '"z":1}}'), SpecFormat.JSON),
        (_megabyte('"k{}":1,', '{"data":{', '"z":1}}'), SpecFormat.JSON),
        (_megabyte('"k{}":1,', '{"parallelism":{', '"z":1}}'), SpecFormat.JSON),
        ('{"' + "k" * 500_000 + '":[' + "1," * 190_000 + "1.5e999]}", SpecFormat.JSON),
        (_megabyte("k{}: 1\n"), SpecFormat.YAML),
        ("k" * 500_000 + ":\n" + "- 1\n" * 100_000, SpecFormat.YAML),
        ("seed: 1" + ":59" * 340_000, SpecFormat.YAML),
        ("optimizer: {lr: 1" + ":59" * 340_000 + ".5}", SpecFormat.YAML),
        ("seed: !!int 1" + ":59" * 340_000, SpecFormat.YAML),
    ],
    ids=[
        *("keys", "keys-of-model", "keys-of-data", "keys-of-a-union", "long-path", "yaml-keys", "yaml-long-path"),
        *("sexagesimal", "sexagesimal-float", "sexagesimal-tag"),
    ],
)
def test_a_hostile_megabyte_is_refused_in_seconds(text: str, spec_format: SpecFormat) -> None:
    """Each of these took minutes, or all memory, when the time was quadratic in the size."""
    start_s = time.thread_time()
    assert len(_problems(text, spec_format)) < 20_000
    assert time.thread_time() - start_s < 20.0


@pytest.mark.parametrize("text", ["12:30", "12:30:45.5", "2030-01-31", "1_0:0"])
def test_what_yaml_takes_for_a_time_stays_text(text: str) -> None:
    spec = parse_text(f"{GOOD}labels: {{at: {text}}}\n", SpecFormat.YAML)
    assert spec.labels["at"] == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0", 0), ("-7", -7), ("1_000", 1000), ("0x10", 16), ("0b11", 3), ("017", 15), ("1.5", 1.5), ("-.5", -0.5)),
        *(
            ("+1.", 1.0),
            (".5", 0.5),
            ("1.5e+3", 1500.0),
            ("1e3", 1000.0),
            ("3e-4", 3e-4),
            ("1E+2", 100.0),
            ("e3", "e3"),
            ("1.2.3", "1.2.3"),
        ),
    ],
)
def test_numbers_are_those_of_yaml(text: str, value: object) -> None:
    assert decode(f"a: {text}", SpecFormat.YAML)[0] == {"a": value}


def test_a_line_is_found_below_keys_with_dots_and_in_lists() -> None:
    text = "a.b:\n  - x: 1\n  - x.y:\n      z: 2\nlater: 3\n"
    _, lines = decode(text, SpecFormat.YAML)
    assert [lines.of(path) for path in ("a.b", "a.b.1", "a.b.1.x.y.z", "a.b.1.x.y.missing", "later", "missing")] == [
        1,
        3,
        4,
        3,
        5,
        None,
    ]


def test_text_that_cannot_be_encoded_is_refused() -> None:
    assert "surrogate" in _problems("a: \ud800")


NOW = 1_000_000.0


def spec_of(finish_by: float | None, **changes: Any) -> JobSpec:
    base = {"stop": {"steps": 1000}, "data": {"corpus": "python-stdlib"}, "elasticity": {"max_workers": 4}}
    return parse_spec({**base, "finish_by": finish_by, **changes})


def test_a_deadline_that_has_passed_is_refused() -> None:
    with pytest.raises(SpecError, match=r"finish_by was 2 min 00 s ago\. Set a later time"):
        check_deadline(spec_of(NOW - 120), (), NOW)


def test_a_deadline_that_all_workers_cannot_meet_is_said_with_the_way_out() -> None:
    note = check_deadline(spec_of(NOW + 5, stop={"steps": 10**9}), (), NOW)
    assert note.startswith("The deadline will probably be missed: finish_by is in 5.0 s, but ")
    assert "Set a later finish_by, or a larger elasticity.max_workers (4 now)." in note


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(None),
        spec_of(NOW + 10 * 365 * 86400),
        spec_of(NOW + 5, stop={"epochs": 1e9}),
        spec_of(NOW + 5, task="mine:Task", data={}, stop={"steps": 10**9}),
    ],
    ids=["none", "far away", "an end that only the data decides", "a task of unknown sizes"],
)
def test_otherwise_nothing_is_said(spec: JobSpec) -> None:
    assert check_deadline(spec, (), NOW) == ""


def test_the_deadline_of_a_script_is_only_refused_if_it_has_passed() -> None:
    script = {"script": {"file": "train.py"}}
    assert check_deadline(parse_spec({**script, "finish_by": NOW + 5}), (), NOW) == ""
    with pytest.raises(SpecError, match="finish_by was 2 min 00 s ago"):
        check_deadline(parse_spec({**script, "finish_by": NOW - 120}), (), NOW)


CPU: dict[str, Any] = {
    "device": "cpu",
    "name": "cpu",
    "num_devices": 2,
    "memory_bytes": 16e9,
    "matmul_flops": {"fp32": 1e11, "bf16": 5e10, "fp16": 5e10},
    "half_width": 12.0,
    "attention_flops": 3e10,
    "elementwise_bytes_per_s": 9e9,
    "host_bytes_per_s": 8e9,
    "groups": {"2": {"latency_s": 1e-4, "bytes_per_s": 2e9}, "4": {"latency_s": 3e-4, "bytes_per_s": 1e9}},
}


def test_a_cpus_ranks_share_its_cores_and_memory() -> None:
    profile = profile_of(CPU)
    assert (profile.name, profile.measured, profile.processors_per_node) == ("cpu", True, 2)
    assert profile.memory_bytes == 8_000_000_000
    assert profile.peak_flops[Precision.BF16] * profile.matmul_efficiency == 5e10
    assert profile.inside.bandwidth == 2e9, "of the group that has a core for each"
    assert profile.inside.latency(2) == 1e-4
    assert profile.sharing(8) == 4.0


@pytest.mark.parametrize(
    ("device", "like"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA H100 80GB HBM3", "h100"), ("?", "h100")],
)
def test_a_gpu_profile_uses_the_data_sheet_for_what_cannot_be_measured(device: str, like: str) -> None:
    measured = CPU | {"device": "cuda", "name": device, "num_devices": 1, "groups": {}}
    measured["matmul_flops"] = {"fp32": 4e13, "bf16": 1.5e14, "fp16": 1.5e14}
    profile = profile_of(measured)
    assert profile.peak_flops == PROFILES[like].peak_flops
    assert profile.matmul_efficiency == pytest.approx(1.5e14 / profile.peak_flops[Precision.BF16])
    assert (profile.inside, profile.between) == (PROFILES[like].inside, PROFILES[like].between)
    assert profile.name == f"{like}-measured"
    share = 3e10 / (0.9 * PROFILES[like].attention_rates[4096][0])
    assert profile.attention_rates[8192][1] == pytest.approx(share * PROFILES[like].attention_rates[8192][1])


NAME = "env:SHOAL_WEBHOOK_SECRET_A"
JOB = JobFacts(id="job-1", name="fish", project="sea", user="ada")


def _secrets(value: str, directory: Path = Path("/nowhere")) -> Secrets:
    return Secrets({"SHOAL_WEBHOOK_SECRET_A": value}, directory)


def test_the_signature_is_that_of_the_published_example() -> None:
    """The example is that of a library for Standard Webhooks."""
    key = _secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").key(NAME)
    body = b'{"test": 2432232314}'
    found = signature("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body, key)
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_headers_name_event_and_time() -> None:
    event = EventView(seq=7, at=1.5, type="job.state", severity=Severity.INFO, message="é", data={"x": float("nan")})
    body = make_body(event, JOB)
    assert json.loads(body) == {
        "id": "job-1_7",
        "job": {"id": "job-1", "name": "fish", "project": "sea", "user": "ada"},
        "seq": 7,
        "at": 1.5,
        "type": "job.state",
        "severity": "info",
        "message": "é",
        "data": {"x": None},
    }
    headers = make_headers(message_id("job-1", 7), body, b"k" * 16, 99.9)
    assert (headers["webhook-id"], headers["webhook-timestamp"]) == ("job-1_7", "99")
    assert headers["webhook-signature"] == signature("job-1_7", 99, body, b"k" * 16)


def test_a_secret_is_text_or_base64() -> None:
    assert _secrets(" sixteen letters! \n").key(NAME) == b"sixteen letters!"


@pytest.mark.parametrize(
    ("value", "reason"), [("short", "fewer than 16 bytes"), ("whsec_%%", "not base64"), ("whsec_AAAA", "fewer than 16")]
)
def test_a_secret_that_cannot_be_used_is_named_and_not_shown(value: str, reason: str) -> None:
    with pytest.raises(SecretUnusable, match=reason) as error:
        _secrets(value).key(NAME)
    assert str(error.value).startswith(f"secret {NAME}: ") and value not in str(error.value)
    assert value not in repr(_secrets(value))


def test_files_and_variables_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff" * 32)
    secrets = Secrets({}, tmp_path)
    with pytest.raises(SecretUnusable, match="no such environment variable"):
        secrets.key(NAME)
    with pytest.raises(SecretUnusable, match="file:a: the file in webhook_secrets_dir: No such file"):
        secrets.key("file:a")
    with pytest.raises(SecretUnusable, match="is not text"):
        secrets.key("file:binary")
