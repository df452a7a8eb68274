from typing import Any

import pytest

from shoal_service.control.submission import check_deadline
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.spec import JobSpec

NOW = 1_000_000.0


def spec_of(finish_by: float | None, **changes: Any) -> JobSpec:
    base = {"stop": {"steps": 1000}, "data": {"corpus": "python-stdlib"}, "elasticity": {"max_workers": 4}}
    return parse_spec({**base, "finish_by": finish_by, **changes})


def test_a_deadline_that_has_passed_is_refused() -> None:
    with pytest.raises(SpecError, match=r"finish_by was 2 min ago\. Set a later time"):
        check_deadline(spec_of(NOW - 120), (), NOW)


def test_a_deadline_that_all_workers_cannot_meet_is_said_with_the_way_out() -> None:
    note = check_deadline(spec_of(NOW + 5, stop={"steps": 10**9}), (), NOW)
    assert note.startswith("The deadline will probably be missed: finish_by is in 5 s, but ")
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
    with pytest.raises(SpecError, match="finish_by was 2 min ago"):
        check_deadline(parse_spec({**script, "finish_by": NOW - 120}), (), NOW)
