"""Every option of every command acts: a value that is given is read."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from shoal_api.cli.main import _GROUPS, PANELS


def unread(function: Callable[..., Any]) -> list[str]:
    """Parameters that the function never reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    read = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    return [name for name in inspect.signature(function).parameters if name not in read]


def test_every_option_of_every_command_is_read() -> None:
    commands = {name: function for panel in PANELS.values() for name, function in panel.items()} | _GROUPS
    ignored = {name: unread(function) for name, function in commands.items()}
    # What `shoal schema` prints is JSON in any case.
    assert {name: options for name, options in ignored.items() if options} == {"schema": ["as_json"]}
    assert len(commands) > 80


def test_a_parameter_that_is_not_read_is_seen() -> None:
    def command(job: str, project: str) -> str:
        return job

    assert unread(command) == ["project"]
