"""What the service requires of the webhooks of a spec, beyond their form: their events are in the catalogue."""

from __future__ import annotations

from shoal_service.core.webhooks.selection import unknown_patterns
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem
from shoal_workers.contract.spec import JobSpec


def check_webhooks(spec: JobSpec) -> None:
    """Raises SpecError: a hook names events that no release of this version has."""
    problems = tuple(
        SpecProblem(path=f"webhooks.{number}.events", message=f"no event has the type {', '.join(unknown)}.")
        for number, hook in enumerate(spec.webhooks)
        if (unknown := unknown_patterns(hook.events))
    )
    if problems:
        raise SpecError(problems)
