"""Which files of a code directory are not packed: the patterns of its `.shoalignore`, which mean what they mean to git
in a `.gitignore`. Pure.

    # a comment         data/        a directory of this name, anywhere
    *.pt                a name, anywhere
    /runs               only in the directory of the file; so is every pattern with an inner slash
    logs/**/raw         ** stands for any number of directories
    !keep.pt            not ignored after all; not inside a directory that is ignored

The packer asks for each directory before it descends, and does not enter an ignored one. Called by `code_archive.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<folders_before>^\*\*/) | (?P<all_inside>/\*\*$) | (?P<folders_between>/\*\*(?=/)) | (?P<name_part>\*+)
    | (?P<character>\?) | \[(?P<negated>[!^]?)(?P<characters>\]?(?:\\.|[^\]\\])*)\] | \\(?P<escaped>.) | (?P<plain>.)
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _Pattern:
    expression: re.Pattern[str]
    ignores: bool
    only_folders: bool


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The patterns of one file. The last one that matches decides."""

    patterns: tuple[_Pattern, ...] = ()

    @staticmethod
    def parse(text: str) -> IgnoreRules:
        """Read the lines of a `.shoalignore`."""
        patterns = (_pattern(line) for line in text.removeprefix("\ufeff").splitlines())
        return IgnoreRules(tuple(rule for rule in patterns if rule is not None))

    def ignore(self, path: str, *, is_folder: bool) -> bool:
        """Return whether a file or directory is left out. `path`: relative to the directory of the file, with
        slashes."""
        for pattern in reversed(self.patterns):
            if (is_folder or not pattern.only_folders) and pattern.expression.fullmatch(path):
                return pattern.ignores
        return False


def _pattern(line: str) -> _Pattern | None:
    line = re.sub(r"(?<!\\) +$", "", line)
    ignores = not line.startswith("!")
    text = line if ignores else line[1:]
    only_folders = text.endswith("/")
    text = text.removesuffix("/")
    if not text or line.startswith("#"):
        return None
    is_anywhere = "/" not in text
    expression = "".join(_expression(token) for token in _TOKEN.finditer(text.removeprefix("/")))
    try:
        return _Pattern(re.compile(("(?:.*/)?" if is_anywhere else "") + expression, re.DOTALL), ignores, only_folders)
    except re.error:  # a range that ends before it begins, for example; git matches nothing with it
        return None


def _expression(token: re.Match[str]) -> str:
    match token.lastgroup:
        case "folders_before":
            return "(?:.*/)?"
        case "folders_between":
            return "(?:/.*)?"
        case "all_inside":
            return "/.+"
        case "name_part":
            return "[^/]*"
        case "character":
            return "[^/]"
        case "characters":
            inside = token["characters"].replace("[", r"\[").replace("&", r"\&").replace("~", r"\~").replace("|", r"\|")
            inside = inside.replace("]", r"\]", 1) if inside.startswith("]") else inside
            return f"(?!/)[{'^' if token['negated'] else ''}{inside}]"
        case _:
            return re.escape(token["escaped"] or token["plain"])
