"""What the service requires of the webhooks of a spec, beyond their form: their events are in the catalogue, and what
sends mail and chat is installed."""

from __future__ import annotations

from shoal_service.control.webhooks.notifier import MISSING, is_installed
from shoal_service.core.webhooks.selection import unknown_patterns
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem
from shoal_workers.contract.spec import JobSpec


def check_webhooks(spec: JobSpec) -> None:
    """Raises SpecError: a hook names events that no release of this version has, or needs apprise, which is not
    installed."""
    problems = []
    for number, hook in enumerate(spec.webhooks):
        if unknown := unknown_patterns(hook.events):
            words = f"no event has the type {', '.join(unknown)}."
            problems.append(SpecProblem(path=f"webhooks.{number}.events", message=words))
        if hook.is_apprise and not is_installed():
            problems.append(SpecProblem(path=f"webhooks.{number}.url", message=f"{MISSING}."))
    if problems:
        raise SpecError(tuple(problems))
