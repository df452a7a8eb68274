"""Projects of a simulation, and what is wrong with them."""

from __future__ import annotations

import pytest

from shoal_service.core.scheduling.market import Project
from shoal_service.simulator.read_projects import parse_projects
from shoal_service.simulator.read_trace import TraceError


def test_projects_by_name_with_defaults() -> None:
    document = {"research": None, "vision": {"weight": 2, "guaranteed": 8, "parent": "research"}}
    assert parse_projects(document, "p.yaml") == {
        "research": Project(name="research"),
        "vision": Project(name="vision", weight=2, guaranteed=8, parent="research"),
    }


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1], "p.yaml must have one key for each project"),
        ({"a": 3}, "project a: 3 is not a mapping"),
        ({"a": {"wait": 1}}, "project a: the setting 'wait' is unknown. Known are parent, weight, guaranteed"),
        ({"a": {"limit": -1}}, "project a: limit is -1 and must be a whole number"),
        ({"a": {"guaranteed": "8"}}, "project a: guaranteed is '8' and must be a whole number"),
        ({"a": {"weight": 0}}, "project a: weight is 0 and must be a number above 0"),
        ({"a": {"parent": "b"}}, "project a: its parent 'b' is not in the file"),
    ],
)
def test_what_is_wrong_is_said_with_the_project(document: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        parse_projects(document, "p.yaml")
