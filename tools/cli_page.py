"""Puts the commands and the exit codes into docs/reference/cli.md: `make docs`.

Reads the signatures and docstrings of the commands that `shoal_api.cli.main` registers. The rest of the page is written
by hand. A test compares the committed page with what this makes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from shoal_api.cli.main import PANELS, load_function
from shoal_api.cli.session import MEANINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"
_COMMANDS = "<!-- commands: made by tools/cli_page.py from the commands' signatures; run `make docs` -->"
_EXIT_CODES = "<!-- exit codes: made by tools/cli_page.py from cli/session.py; run `make docs` -->"
_END = "<!-- end -->"
_BAR = "\\|"
"""A bar within a cell of a table."""
_COMMON = ("JOB", "SPEC", "--set", "--url", "--json")
"""Parameters that are explained once on the page, by hand; here they appear only in the usage."""


def main() -> None:
    PAGE.write_text(with_commands(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_commands(page: str) -> str:
    """The page with new sections of commands and exit codes."""
    for begin, section in ((_COMMANDS, _commands()), (_EXIT_CODES, _exit_codes())):
        before, rest = page.split(begin)
        _, after = rest.split(_END, 1)
        page = f"{before}{begin}\n{section}\n{_END}{after}"
    return page


def _commands() -> str:
    return "\n\n".join(
        "\n\n".join([f"### {panel}", *(_command(name, load_function(name)) for name in commands)])
        for panel, commands in PANELS.items()
    )


def _command(name: str, function: Callable[..., None]) -> str:
    parameters = list(_parameters(function))
    usage = " ".join(["shoal", name, *(_usage(info, type_) for info, type_, _ in parameters)])
    rows = [_row(*one) for one in parameters if _name(one[0]) not in _COMMON]
    table = ["| argument or option | meaning |", "|---|---|", *rows] if rows else []
    text = inspect.getdoc(function) or ""
    return "\n\n".join(part for part in (f"#### {name}", f"`{usage}`", text, "\n".join(table)) if part)


def _parameters(function: Callable[..., None]) -> Iterator[tuple[ArgumentInfo | OptionInfo, Any, Any]]:
    """Typer's description of each parameter, its type without Annotated and None, and its default."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if get_origin(hint) is not Annotated:  # `X | None = None` around an Annotated alias
            hint = next(one for one in get_args(hint) if get_origin(one) is Annotated)
        type_, info = get_args(hint)[:2]
        named = [one for one in get_args(type_) if one is not NoneType]
        yield info, named[0] if NoneType in get_args(type_) else type_, parameter.default


def _usage(info: ArgumentInfo | OptionInfo, type_: Any) -> str:
    if isinstance(info, ArgumentInfo):
        return str(info.metavar)
    flag, value = _label(info, type_)
    repeated = " ..." if get_origin(type_) is list else ""
    return f"[{flag}{f' {value}' if value else ''}{repeated}]"


def _row(info: ArgumentInfo | OptionInfo, type_: Any, default: Any) -> str:
    text = str(info.help)
    if isinstance(info, ArgumentInfo):
        return f"| `{str(info.metavar).replace('|', _BAR)}` | {text} |"
    value = _label(info, type_)[1].replace("|", _BAR)
    names = ", ".join(f"`{one}`" for one in _names(info)) + (f" `{value}`" if value else "")
    if isinstance(default, Enum):
        default = default.value
    if default not in (None, False, "", inspect.Parameter.empty) and "efault" not in text:
        text += f" Default: {default}."
    bounds = [f"{sign} {bound:g}" for sign, bound in ((">=", info.min), ("<=", info.max)) if bound is not None]
    if bounds:
        text += f" Limits: {', '.join(bounds)}."
    return f"| {names} | {text} |"


def _label(info: ArgumentInfo | OptionInfo, type_: Any) -> tuple[str, str]:
    """The first name of an option, and a word for its value; empty for a flag."""
    flag = _name(info)
    if info.metavar:
        return flag, str(info.metavar)
    if type_ is bool:
        return flag, ""
    if inspect.isclass(type_) and issubclass(type_, Enum):
        return flag, "|".join(one.value for one in type_)
    words = {int: "N", float: "NUMBER", Path: "PATH"}
    return flag, words.get(type_, re.sub(r"\W+", "_", flag.strip("-")).upper())


def _name(info: ArgumentInfo | OptionInfo) -> str:
    return str(info.metavar) if isinstance(info, ArgumentInfo) else _names(info)[0]


def _names(info: OptionInfo) -> list[str]:
    """The names of an option, such as `--follow`, `-f`. Typer keeps the first positional argument of `Option()` as its
    default."""
    return [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]


def _exit_codes() -> str:
    rows = [f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n".join(["| exit code | meaning |", "|---|---|", *rows])


if __name__ == "__main__":
    main()
