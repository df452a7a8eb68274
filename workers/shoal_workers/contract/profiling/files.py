"""Where the files of a job's profiles lie, and which profiles are too old to be kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shoal_workers.contract.profiling.messages import KEPT_PROFILES

FOLDER = "profiles"
"""Folder of the profiles, beside the checkpoints of the job."""
_PREFIX = "profile-"


def name_of(number: int) -> str:
    """Name of the directory of a profile."""
    return f"{_PREFIX}{number:06d}"


def to_delete(names: Iterable[str], newest: int) -> list[str]:
    """The directories of profiles that are too old once profile `newest` is kept. Other names are left alone."""
    numbers = {name: int(name.removeprefix(_PREFIX)) for name in names if _is_profile(name)}
    return sorted(name for name, number in numbers.items() if number <= newest - KEPT_PROFILES)


def _is_profile(name: str) -> bool:
    digits = name.removeprefix(_PREFIX)
    return name.startswith(_PREFIX) and digits.isascii() and digits.isdigit()
