"""Which events a hook selects, and the hooks of the service's settings."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field, field_validator

from shoal_service.core.events.catalogue import CATALOGUE
from shoal_workers.contract.placing import is_label
from shoal_workers.contract.spec import WebhookSpec

OF_JOBS = "jobs"
"""Name in metrics of the hooks of all specs together."""
_OWN = "webhook."
"""Events about deliveries are never delivered: two receivers that are away would cause each other's events for ever."""


class ServiceWebhook(WebhookSpec):
    """A hook of the settings: events of all jobs."""

    name: str = Field(max_length=63)
    """Unique; lower-case letters, digits and dashes. Names the cursors in the store, and the hook in metrics."""

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if not is_label(name) or name == OF_JOBS:
            raise ValueError(
                f"name {name!r} is not valid: use at most 63 lower-case letters, digits and inner dashes, and not "
                f"{OF_JOBS!r}, which stands for the hooks of specs."
            )
        return name


def selects(patterns: Iterable[str], type_: str) -> bool:
    """Whether a hook with these patterns is sent events of this type."""
    if type_.startswith(_OWN):
        return False
    return any(pattern in ("*", type_) or _is_below(pattern, type_) for pattern in patterns)


def unknown_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """Those that select no type of the catalogue: probably typing errors."""
    return tuple(pattern for pattern in patterns if not any(selects((pattern,), type_) for type_ in CATALOGUE))


def _is_below(pattern: str, type_: str) -> bool:
    return pattern.endswith(".*") and type_.startswith(pattern.removesuffix("*"))
