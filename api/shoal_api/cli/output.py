"""Writes the output of a command: results to standard output, progress and errors to standard error.

With `--json` standard output holds JSON only, in every case: one document, or one line per item of a stream.
Every command writes through the Output of its `Session`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar

from pydantic import BaseModel

from shoal_api.cli.errors import CliError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

T = TypeVar("T")
Printable: TypeAlias = "RenderableType | list[RenderableType]"
"""What rich prints: a table, a text, or several of them below each other."""
_PIPED_WIDTH = 200
"""Columns when standard output is not a terminal: a table that wraps at 80 columns cannot be searched with grep."""


@dataclass(frozen=True)
class Output:
    """The output of one invocation of a command."""

    as_json: bool

    @cached_property
    def stdout(self) -> Console:
        return _console(stderr=False)

    @cached_property
    def stderr(self) -> Console:
        return _console(stderr=True)

    @property
    def live(self) -> bool:
        """Standard output is a terminal, so moving elements are allowed."""
        return not self.as_json and self.stdout.is_terminal

    def document(self, value: T, text: Printable | Callable[[T], Printable]) -> None:
        """Write the result of a command: `text`, or what it makes of the value; with `--json` the value."""
        if self.as_json:
            self._write(json.dumps(plain(value), indent=2))
            return
        rendered = text(value) if callable(text) else text
        for part in rendered if isinstance(rendered, list) else [rendered]:
            self.stdout.print(part)

    def line(self, value: Any, text: str, style: str = "plain") -> None:
        """Write one item of a stream and flush it."""
        if self.as_json:
            self._write(json.dumps(plain(value), separators=(",", ":")))
        else:
            self.stdout.print(text, style=STYLES[style], soft_wrap=True)

    def say(self, text: str, style: str = "plain") -> None:
        """Write a progress message for people to standard error."""
        self.stderr.print(text, style=STYLES[style], soft_wrap=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Say on standard error what is being done while it takes time: on a terminal a line that disappears."""
        if self.stderr.is_terminal:
            with self.stderr.status(text):
                yield
        else:
            self.say(text, "dim")
            yield

    def fail(self, error: CliError) -> None:
        """Write the error to standard error; with `--json` also as a document to standard output."""
        if self.as_json:
            self._write(json.dumps(error.document()))
        self.say(f"error: {error.message}", "bad")
        for detail in error.details:
            self.say(f"  {detail}", "bad")
        if error.hint:
            self.say(f"  {error.hint}", "dim")

    def _write(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


@contextmanager
def complete_file(path: Path, *, parents: bool = False) -> Iterator[BinaryIO]:
    """Open a file that appears under its name only when all of it is written. `parents`: make missing directories.
    Raises CliError."""
    part = path.with_name(f"{path.name}.part")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


STYLES = {"plain": "", "bold": "bold", "good": "green", "warn": "yellow", "bad": "red", "dim": "dim"}


def plain(value: Any) -> Any:
    """Convert models and containers to values that JSON can represent."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console.width = _PIPED_WIDTH
    return console
