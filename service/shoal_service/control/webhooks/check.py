"""What the service requires of the webhooks of a spec, beyond their form: their events are in the catalogue, the
rules of the service allow their receivers and secrets, and what sends mail and chat is installed."""

from __future__ import annotations

from shoal_service.control.webhooks.notifier import MISSING, is_installed
from shoal_service.core.webhooks.rules import WebhookRules
from shoal_service.core.webhooks.selection import unknown_patterns
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem
from shoal_workers.contract.spec import JobSpec


def check_webhooks(spec: JobSpec, rules: WebhookRules) -> None:
    """Raises SpecError: a hook names events that no release of this version has, an address or a secret that the rules
    refuse, or needs apprise, which is not installed. Names are resolved when they are called, not here."""
    problems = []
    for number, hook in enumerate(spec.webhooks):
        if unknown := unknown_patterns(hook.events):
            words = f"no event has the type {', '.join(unknown)}."
            problems.append(SpecProblem(path=f"webhooks.{number}.events", message=words))
        if words := rules.refusal_of_receiver(hook):
            problems.append(SpecProblem(path=f"webhooks.{number}.url", message=f"{words}."))
        if words := rules.refusal_of_secret(hook, spec.project):
            problems.append(SpecProblem(path=f"webhooks.{number}.secret", message=words))
        if hook.is_apprise and not is_installed():
            problems.append(SpecProblem(path=f"webhooks.{number}.url", message=f"{MISSING}."))
    if problems:
        raise SpecError(tuple(problems))
