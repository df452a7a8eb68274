"""Many cases of one rule in one test, which names every case that fails."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def failed_cases(
    check: Callable[[Case], object], cases: Iterable[Case], name: Callable[[Case], str] = str
) -> dict[str, str]:
    """The cases for which `check` raises, by name, each with its error."""
    failed: dict[str, str] = {}
    for case in cases:
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:
            failed[name(case)] = f"{type(error).__name__}: {error}"
    return failed
