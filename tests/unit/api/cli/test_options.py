"""Every option of every command acts: a value that is given is read."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal_api.cli import commands
from shoal_api.cli.main import COMMANDS, load_function


def unread(function: Callable[..., Any]) -> list[str]:
    """Parameters that the function never reads. The decorator of commands reads --url and --json."""
    function = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    read = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    return [name for name in inspect.signature(function).parameters if name not in (*read, "session")]


def test_every_option_of_every_command_is_read() -> None:
    ignored = {name: unread(load_function(name)) for name in COMMANDS}
    assert {name: options for name, options in ignored.items() if options} == {}
    assert len(COMMANDS) > 75


def test_a_parameter_that_is_not_read_is_seen() -> None:
    def command(job: str, project: str) -> str:
        return job

    assert unread(command) == ["project"]


def test_every_command_has_a_line_in_the_table() -> None:
    folder = Path(commands.__file__).parent
    decorated = {
        f"{module.stem}.{node.name}"
        for module in folder.glob("*.py")
        for node in ast.parse(module.read_bytes()).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith(("command(", "_for_each_job(")) for decorator in node.decorator_list)
    }
    assert decorated == set(COMMANDS.values())
