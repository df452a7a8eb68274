"""The state of the delivery of webhooks over REST and with the client; and specs that name unknown events."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from shoal_api.client import Client, Forbidden
from shoal_api.client.errors import ApiError, InvalidSpec
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.core.webhooks import Retries, WebhookRules
from shoal_service.store import access, webhook_lanes
from shoal_service.store.webhook_lanes import Failure

HOOK = {"url": "https://example.org/token", "secret": "file:a"}


def test_the_hooks_of_a_job_and_those_that_fail_are_shown(service: Any, spec: dict[str, Any]) -> None:
    job_id = service.client.submit({**spec, "webhooks": [HOOK, {**HOOK, "events": ["*"]}]}).id
    first, second = service.client.webhooks(job_id)
    assert (first.hook, first.job_id, first.receiver, first.delivered) == ("job/0", job_id, "https://example.org", 0)
    assert (first.events, second.events) == (("job.state", "incident.*", "alert.*"), ("*",))
    assert job_id not in [hook.job_id for hook in service.client.webhooks()], "only those that fail"
    [lane] = [lane for lane in service.store.reading(webhook_lanes.read_backlog)(0.0) if lane.key == ("job/1", job_id)]
    retries = Retries(num_failed=3, failing_since=10.0, next_at=20.0)
    failure = Failure(retries=retries, error="has answered 500", seq=0, num_given_up=0, waiting_since=9.0)
    service.store.writing(webhook_lanes.fail, service.epoch)(lane, failure, None, now=11.0)
    [failing] = [hook for hook in service.client.webhooks() if hook.job_id == job_id]
    assert (failing.hook, failing.failing, failing.waiting_since) == ("job/1", 1, 9.0)
    assert (failing.failing_since, failing.next_at, failing.error) == (10.0, 20.0, "has answered 500")


def test_an_unknown_job_is_named(service: Any) -> None:
    with pytest.raises(ApiError) as error:
        service.client.webhooks("job-unknown")
    assert error.value.code == "job-not-found"


def test_a_spec_with_an_unknown_event_is_refused(service: Any, spec: dict[str, Any]) -> None:
    wrong = {**spec, "webhooks": [HOOK, {**HOOK, "events": ["job.state", "job.stat"]}]}
    check = service.client.validate(wrong)
    assert [problem.path for problem in check.errors] == ["webhooks.1.events"]
    with pytest.raises(InvalidSpec, match=r"no event has the type job\.stat"):
        service.client.submit(wrong)


def test_a_spec_may_use_what_the_rules_allow(store: Any, run_service: Callable[..., Any], spec: dict[str, Any]) -> None:
    rules = WebhookRules(secrets={"vision": ("file:a",)})
    with run_service(store, webhooks=rules) as service:
        wrong = {**spec, "webhooks": [{**HOOK, "url": "http://169.254.169.254/latest"}]}
        check = service.client.validate(wrong)
        assert [problem.path for problem in check.errors] == ["webhooks.0.url", "webhooks.0.secret"]
        with pytest.raises(InvalidSpec, match="SHOAL_WEBHOOK_PROJECT_SECRETS"):
            service.client.submit({**spec, "webhooks": [HOOK]})
        service.client.submit({**spec, "project": "vision", "webhooks": [HOOK]})


def test_only_an_admin_sets_a_hook_for_mail_and_chat(service: Any, spec: dict[str, Any]) -> None:
    chat = {**spec, "webhooks": [{"url": "apprise:", "secret": "file:chat"}]}
    request = TokenRequest(name="ada", role=Role.OPERATOR, projects=None, user="ada")
    token = service.store.writing(access.create_token)(request, by="test", now=time.time()).token
    with Client(service.url, token=token) as operator:
        with pytest.raises(Forbidden, match="apprise:"):
            operator.submit(chat)
    service.client.submit(chat)
