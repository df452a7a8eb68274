"""The doctor says what it checks before it knows the result: some checks import large libraries."""

from __future__ import annotations

import pytest

from shoal_api.cli.commands.check import examine
from shoal_api.cli.doctor.findings import Finding, Verdict
from shoal_api.cli.doctor.probes import checks_of
from shoal_api.cli.output import Output


def test_each_check_is_named_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def check() -> Finding:
        said.append(capsys.readouterr().err)
        return Finding(check="slow", verdict=Verdict.OK, message="done")

    names = [name for name, _ in checks_of("http://127.0.0.1:1", None)]
    found = list(examine(Output(as_json=True), ((name, check) for name in names)))
    assert said == [f"checking {name} ...\n" for name in names] and len(found) == len(names)
    assert capsys.readouterr().out == "", "standard output holds the result only"
