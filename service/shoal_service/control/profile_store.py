"""Measured hardware profiles, as JSON files under the state directory: `profiles/<name>.json`.

`shoal profile` writes them. `shoal plan` and the server read them together with the built-in ones; a stored profile
replaces the built-in one of the same name. The planner prefers a measured profile.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from shoal_service.core.hardware_profile import DeviceKind
from shoal_service.planner import HardwareProfile
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.planning import profile_for
from shoal_workers.contract.spec import JobSpec

_FOLDER = "profiles"


class ProfileError(ValueError):
    """A stored profile that cannot be read; the message names the file."""

    code = "invalid_profile"


def load_profiles(state_dir: Path) -> dict[str, HardwareProfile]:
    """All profiles by name; a stored one replaces the built-in one of its name. Raises ProfileError."""
    found = dict(PROFILES)
    for path in sorted((state_dir / _FOLDER).glob("*.json")):
        try:
            profile = HardwareProfile.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            first = str(error).splitlines()[0]
            raise ProfileError(
                f"{path} is not a hardware profile ({first}). Remove it, or run `shoal profile`."
            ) from None
        found[profile.name] = profile
    return found


def measured_profile(profiles: Iterable[HardwareProfile], *, has_gpu: bool) -> HardwareProfile | None:
    """The first profile that was measured on a node of that kind."""
    return next((one for one in profiles if one.measured and (one.kind is DeviceKind.GPU) == has_gpu), None)


def planning_profile(spec: JobSpec, profiles: Iterable[HardwareProfile]) -> HardwareProfile:
    """The profile with which the layouts of a job are planned."""
    return profile_for(spec, measured_profile(profiles, has_gpu=spec.worker.gpus > 0))


def save_profile(state_dir: Path, profile: HardwareProfile) -> Path:
    """Replaces the stored profile of the same name; returns the file."""
    path = state_dir / _FOLDER / f"{profile.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(profile.model_dump_json(indent=2), encoding="utf-8")
    partial.replace(path)
    return path
