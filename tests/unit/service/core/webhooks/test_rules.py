"""What webhooks of specs may reach, and which secrets they may name."""

from __future__ import annotations

import pytest

from shoal_service.core.webhooks.rules import UNRESTRICTED, WebhookRules
from shoal_workers.contract.spec import WebhookSpec

CLOSED = WebhookRules()


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
