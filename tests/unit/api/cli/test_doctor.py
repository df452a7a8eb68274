"""The doctor judges what it measured, and says what it checks before it knows the result."""

import pytest

from shoal_api.cli.commands.doctor import examine
from shoal_api.cli.doctor import (
    GIB,
    Finding,
    Verdict,
    judge_library,
    judge_python,
    judge_ray_auth,
    judge_space,
    list_checks,
    worst,
)
from shoal_api.cli.output import Output


def test_an_old_python_fails_and_one_that_was_not_tried_warns() -> None:
    assert judge_python((3, 10), "3.10.1").verdict is Verdict.FAIL
    assert judge_python((3, 13), "3.13.0").verdict is Verdict.OK
    assert judge_python((3, 14), "3.14.0").verdict is Verdict.WARN


def test_free_space_is_compared_with_two_limits() -> None:
    def judged(gib: float) -> Verdict:
        free = int(gib * GIB)
        return judge_space("disk", "there", free, fail_below_gib=1, warn_below_gib=4, hint="make room").verdict

    assert [judged(gib) for gib in (0.5, 2, 8)] == [Verdict.FAIL, Verdict.WARN, Verdict.OK]


def test_a_library_of_another_version_fails_even_if_its_number_begins_equally() -> None:
    assert judge_library("torch", "2.13.0+cpu", "").verdict is Verdict.OK
    assert judge_library("torch", "2.130.0", "").verdict is Verdict.FAIL
    assert judge_library("ray", None, "no module").verdict is Verdict.FAIL


def test_token_mode_without_a_token_fails() -> None:
    assert judge_ray_auth("token", None).verdict is Verdict.FAIL
    assert judge_ray_auth("token", "RAY_AUTH_TOKEN").verdict is Verdict.OK
    assert judge_ray_auth(None, None).verdict is Verdict.OK


def test_the_worst_verdict_counts() -> None:
    findings = [Finding(check="a", verdict=verdict, message="") for verdict in (Verdict.WARN, Verdict.OK)]
    assert worst(findings) is Verdict.WARN
    assert worst([]) is Verdict.OK


def test_each_check_is_named_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def check() -> Finding:
        said.append(capsys.readouterr().err)
        return Finding(check="slow", verdict=Verdict.OK, message="done")

    names = [name for name, _ in list_checks("http://127.0.0.1:1", None)]
    found = list(examine(Output(as_json=True), ((name, check) for name in names)))
    assert said == [f"checking {name} ...\n" for name in names] and len(found) == len(names)
    assert capsys.readouterr().out == "", "standard output holds the result only"
