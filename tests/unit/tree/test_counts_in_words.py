"""Every sentence that counts things says `1 worker` and `2 workers`: numbers before nouns come from `count_text`."""

import ast
import re

from kit.sources import relative, sources

ROOMS = ("service/shoal_service/core", "service/shoal_service/supervisor", "service/shoal_service/control")
_NOUNS = re.compile(
    r" (?:[a-z-]+ )?(workers|ranks|nodes|jobs|steps|times|groups|re-formations|saves|checkpoints|processes|tries)\b"
)
_AFTER_A_VALUE = re.compile(rf"\}}{_NOUNS.pattern}")
_OF_OTHERS = re.compile(r" (of|and|or|in|on|at|from|to|beyond|for|is|its|by|as) ")
"""`{job} in steps`: what stands before the noun does not count it."""


def uncounted(source: str) -> list[str]:
    """The parts of f-strings in which a count stands before a noun in the plural. A constant is never 1, and a number
    that is rounded was measured."""
    found = []
    for text in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr)):
        for value, after in zip(text.values, text.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue) or value.format_spec or not isinstance(after, ast.Constant):
                continue
            noun = _NOUNS.match(str(after.value))
            expression = ast.unparse(value.value)
            is_constant = re.fullmatch(r"_?[A-Z][A-Z_]+", expression) is not None
            if (
                noun
                and not _OF_OTHERS.match(noun[0])
                and not is_constant
                and not expression.startswith(("count_text(", "_gives("))
            ):
                found.append(f"{expression}{noun[0]}")
    return found


def test_numbers_before_nouns_are_counted() -> None:
    suspects = {path: text for path, text in sources(*ROOMS).items() if _AFTER_A_VALUE.search(text)}
    matches = {relative(path): parts for path, text in suspects.items() if (parts := uncounted(text))}
    assert matches == {}, "write it with count_text of core/quantities.py"


def test_what_is_looked_for() -> None:
    assert uncounted('f"{n} workers are ready"') == ["n workers"]
    assert uncounted('f"at most {limit} good checkpoints"') == ["limit good checkpoints"]
    assert uncounted("""f"{count_text(n, 'worker')} ready, at most {_MOST} jobs, {job} in steps\"""") == []
