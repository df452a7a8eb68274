"""Makes a failing description smaller: each choice is set to its plain value, one by one, as long as it still fails.

Called by tools/fuzz_tasks.py with --shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kit.fuzz.outcome import Outcome


def shrunk(
    description: Any,
    outcome: Outcome,
    try_it: Callable[[Any], Outcome],
    say: Callable[[str], None],
    simpler: Callable[[Any], Iterable[Any]],
) -> tuple[Any, Outcome]:
    """The smallest description that ends as badly as this one, and its outcome.

    Another fault of the same sort may take the first one's place. A hang or a death counts as one sort, for which of
    them comes depends on time.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in simpler(description):
            found = try_it(candidate)
            if _sort(found) == _sort(outcome):
                say(f"{found.outcome} still: {', '.join(candidate.features)}")
                description, outcome, is_smaller = candidate, found, True
                break
    return description, outcome


def _sort(outcome: Outcome) -> str:
    return "stuck" if outcome.outcome in ("hang", "died", "collective_failed", "interrupted") else outcome.outcome
