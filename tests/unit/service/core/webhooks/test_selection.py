"""Which events a hook gets."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shoal_service.core.events.catalogue import CATALOGUE
from shoal_service.core.webhooks.selection import ServiceWebhook, selects, unknown_patterns

HOOK = {"url": "https://example.org/hook", "secret": "env:SHOAL_WEBHOOK_SECRET_A"}


def test_patterns_select_types() -> None:
    assert selects(["job.state"], "job.state") and not selects(["job.state"], "job.stated")
    assert selects(["incident.*"], "incident.opened") and not selects(["incident.*"], "incidents.opened")
    assert selects(["job.state", "incident.*"], "incident.closed")
    assert not selects([], "job.state")


def test_everything_is_every_type_but_those_about_webhooks() -> None:
    assert {type_ for type_ in CATALOGUE if not selects(["*"], type_)} == {"webhook.gave_up"}


def test_patterns_that_select_nothing_are_named() -> None:
    assert unknown_patterns(["job.state", "job.*", "*", "job.stat", "moon.*", "webhook.gave_up"]) == (
        "job.stat",
        "moon.*",
        "webhook.gave_up",
    )


@pytest.mark.parametrize("name", ["", "Ops", "jobs", "a b", "x" * 64])
def test_a_name_is_a_label_and_not_the_one_that_metrics_use(name: str) -> None:
    with pytest.raises(ValidationError):
        ServiceWebhook.model_validate({"name": name, **HOOK})


def test_state_changes_and_incidents_are_selected_by_default() -> None:
    assert ServiceWebhook.model_validate({"name": "ops", **HOOK}).events == ("job.state", "incident.*")
