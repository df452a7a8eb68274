"""Which events a hook gets, what webhooks of specs may reach, and the schedule of attempts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal_service.core.events.catalogue import CATALOGUE
from shoal_service.core.webhooks import (
    UNRESTRICTED,
    Retries,
    RetryPolicy,
    ServiceWebhook,
    WebhookRules,
    after_failure,
    selects,
    unknown_patterns,
)
from shoal_workers.contract.webhooks import WebhookSpec

HOOK = {"url": "https://example.org/hook", "secret": "env:SHOAL_WEBHOOK_SECRET_A"}
CLOSED = WebhookRules()
POLICY = RetryPolicy(first_s=1.0, longest_s=60.0, give_up_s=1000.0)


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


def test_state_changes_incidents_and_alerts_are_selected_by_default() -> None:
    assert ServiceWebhook.model_validate({"name": "ops", **HOOK}).events == ("job.state", "incident.*", "alert.*")


def hook(url: str = "https://example.org/x", secret: str = "file:a") -> WebhookSpec:
    return WebhookSpec(url=url, secret=secret)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::127.0.0.1"),
        *("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:db8::1"),
    ],
)
def test_an_address_that_is_not_public_is_unusable_unless_it_is_allowed(address: str) -> None:
    assert CLOSED.usable("name.example", [address]) == ()
    assert UNRESTRICTED.usable("name.example", [address]) == (address,)
    assert WebhookRules.read("Name.Example", {}).usable("name.example.", [address]) == (address,)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_a_public_address_is_usable(address: str) -> None:
    assert CLOSED.usable("name.example", ["10.0.0.1", address]) == (address,)


def test_a_network_is_allowed_alone() -> None:
    rules = WebhookRules.read("10.2.0.0/16, hooks.internal, fd00::/8", {})
    assert rules.usable("a", ["10.2.3.4", "10.3.0.1", "fd00::7"]) == ("10.2.3.4", "fd00::7")


@pytest.mark.parametrize("receivers", ["10.2.0.0/33", "10.2.0.1/16", "10.2.0", "fd00::/x"])
def test_a_receiver_that_is_none_is_named(receivers: str) -> None:
    with pytest.raises(ValueError, match="is not a host, an address or a network"):
        WebhookRules.read(receivers, {})


@pytest.mark.parametrize("host", ["127.0.0.1:99", "localhost", "a.localhost.", "[::1]:80", "169.254.169.254"])
def test_an_address_in_a_url_is_refused_at_submit(host: str) -> None:
    assert "SHOAL_WEBHOOK_RECEIVERS" in CLOSED.refusal_of_receiver(hook(f"http://{host}/x"))
    assert UNRESTRICTED.refusal_of_receiver(hook(f"http://{host}/x")) == ""


def test_a_name_is_not_resolved_at_submit() -> None:
    assert CLOSED.refusal_of_receiver(hook()) == CLOSED.refusal_of_receiver(hook("apprise:")) == ""


def test_a_secret_is_of_the_projects_that_were_given_it() -> None:
    rules = WebhookRules(secrets={"vision": ("file:a",), "*": ("file:all",), "ops": ("*",)})
    assert not rules.refusal_of_secret(hook(), "vision") and not rules.refusal_of_secret(hook(), "ops")
    assert not rules.refusal_of_secret(hook(secret="file:all"), "text")
    words = rules.refusal_of_secret(hook(), "text")
    assert "'text' may not use the secret file:a; its secrets are: file:all" in words
    assert "its secrets are: none" in CLOSED.refusal_of_secret(hook(), "text")


def _fail(before: Retries, waiting: list[float], now: float, spread: float = 0.5) -> Retries:
    return after_failure(before, waiting, now=now, spread=spread, policy=POLICY).retries


def test_pauses_double_up_to_the_longest() -> None:
    retries, now, pauses = Retries(), 0.0, []
    for _ in range(9):
        retries = _fail(retries, [0.0], now)
        assert retries.next_at is not None
        pauses.append(retries.next_at - now)
        now = retries.next_at
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert retries.failing_since == 0.0


def test_lanes_that_fail_together_are_not_tried_together() -> None:
    first, second = (_fail(Retries(), [0.0], 100.0, spread) for spread in (0.0, 1.0))
    assert (first.next_at, second.next_at) == (100.75, 101.25)


def test_an_event_is_given_up_after_it_has_waited_long_enough_for_a_receiver_that_fails() -> None:
    since = Retries(num_failed=20, failing_since=500.0)
    waiting = [10.0, 400.0, 600.0, 601.0]
    assert after_failure(since, waiting, now=1499.0, spread=0.5, policy=POLICY).num_given_up == 0
    assert after_failure(since, waiting, now=1500.0, spread=0.5, policy=POLICY).num_given_up == 2
    assert after_failure(since, waiting, now=1600.0, spread=0.5, policy=POLICY).num_given_up == 3


def test_an_event_that_is_old_at_its_first_attempt_gets_the_whole_time() -> None:
    verdict = after_failure(Retries(), [0.0], now=1e9, spread=0.5, policy=POLICY)
    assert verdict.num_given_up == 0
    assert verdict.reason == "failure 1 in 0 s, next attempt in 1.0 s"


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=8).map(sorted),
    st.floats(0, 1e6),
    st.integers(0, 2000),
    st.floats(0, 1),
)
def test_there_is_always_a_next_attempt_in_bounded_time_and_what_is_given_up_is_the_oldest(
    waiting: list[float], now: float, num_failed: int, spread: float
) -> None:
    before = Retries(num_failed=num_failed, failing_since=now / 2 if num_failed else None)
    verdict = after_failure(before, waiting, now=now, spread=spread, policy=POLICY)
    assert verdict.retries.next_at is not None
    assert 0 < verdict.retries.next_at - now <= POLICY.longest_s * 1.25 + 1e-6
    assert verdict.retries.num_failed == num_failed + 1
    assert 0 <= verdict.num_given_up <= len(waiting)
    kept = waiting[verdict.num_given_up :]
    assert all(now - max(at, before.failing_since or now) < POLICY.give_up_s for at in kept[:1])


def test_a_time_in_the_future_is_not_due() -> None:
    assert Retries().is_due(0.0) and Retries(next_at=5.0).is_due(5.0)
    assert not Retries(next_at=5.0).is_due(4.9)
