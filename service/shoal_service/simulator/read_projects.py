"""Reads the projects of a simulation from a decoded YAML or JSON document.

vision: {weight: 2, guaranteed: 8}
speech: {limit: 16, parent: research}
"""

from __future__ import annotations

import math
from typing import Any

from shoal_service.core.scheduling.market import Project
from shoal_service.simulator.read_trace import TraceError

_COUNTS = ("guaranteed", "limit", "max_running", "max_queued")


def parse_projects(document: object, source: str) -> dict[str, Project]:
    """By name. `source` for messages. Raises TraceError."""
    if not isinstance(document, dict):
        raise TraceError(f"{source} must have one key for each project, such as: vision: {{weight: 2, guaranteed: 8}}.")
    projects = {str(name): _project(str(name), fields, source) for name, fields in document.items()}
    for project in projects.values():
        if project.parent is not None and project.parent not in projects:
            raise TraceError(f"{source}, project {project.name}: its parent {project.parent!r} is not in the file.")
    return projects


def _project(name: str, fields: object, source: str) -> Project:
    where = f"{source}, project {name}"
    fields = {} if fields is None else fields
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: {fields!r} is not a mapping of settings.")
    known = ("parent", "weight", *_COUNTS)
    given: dict[str, Any] = {}
    for key, value in fields.items():
        if key not in known:
            raise TraceError(f"{where}: the setting {key!r} is unknown. Known are {', '.join(known)}.")
        if key in _COUNTS and not (isinstance(value, int) and value >= 0):
            raise TraceError(f"{where}: {key} is {value!r} and must be a whole number, 0 or more.")
        if key == "weight" and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise TraceError(f"{where}: weight is {value!r} and must be a number above 0.")
        given[key] = value
    return Project(name=name, **given)
