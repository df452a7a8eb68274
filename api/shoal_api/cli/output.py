"""Where words go: results to standard output, progress and errors to standard error, `--json` as one document.

With `--json` standard output carries JSON only, whatever happens: a document, or one line per item where something is
followed. Human text never mixes in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from shoal_api.cli.errors import CliError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_PIPED_WIDTH = 200
"""Columns when nobody looks: a table that wraps at 80 is useless to grep."""


@dataclass(frozen=True)
class Output:
    """One per command."""

    as_json: bool

    @cached_property
    def stdout(self) -> Console:
        return _console(stderr=False)

    @cached_property
    def stderr(self) -> Console:
        return _console(stderr=True)

    @property
    def live(self) -> bool:
        """A person watches: things may move."""
        return not self.as_json and self.stdout.is_terminal

    def document(self, value: Any, text: Callable[[], RenderableType | Iterable[RenderableType]]) -> None:
        """The result of a command. `text` is only called when people read it."""
        if self.as_json:
            self._write(json.dumps(plain(value), indent=2))
            return
        rendered = text()
        for part in [rendered] if isinstance(rendered, str) or not isinstance(rendered, list) else rendered:
            self.stdout.print(part)

    def line(self, value: Any, text: str, style: str = "plain") -> None:
        """One item of a stream, written at once."""
        if self.as_json:
            self._write(json.dumps(plain(value), separators=(",", ":")))
        else:
            self.stdout.print(text, style=STYLES[style], soft_wrap=True)

    def say(self, text: str, style: str = "plain") -> None:
        """Progress, for people, on standard error."""
        self.stderr.print(text, style=STYLES[style], soft_wrap=True)

    def fail(self, error: CliError) -> None:
        """The error on standard error, and with `--json` as a document on standard output too."""
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


STYLES = {"plain": "", "good": "green", "warn": "yellow", "bad": "red", "dim": "dim"}


def plain(value: Any) -> Any:
    """Values, and containers of them, as JSON can hold them."""
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
