"""Webhooks of a spec: what they accept, and what their messages say."""

from typing import Any

import pytest

from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.webhooks import WebhookSpec

HOOK = {"url": "https://example.org:8443/hooks/token?x=1", "secret": "file:team-a"}


def _spec(*hooks: dict[str, Any]) -> JobSpec:
    return parse_spec({"stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}, "webhooks": list(hooks)})


def test_a_hook_needs_a_url_and_a_secret() -> None:
    [hook] = _spec(HOOK).webhooks
    assert hook.events == ("job.state", "incident.*")
    assert hook.receiver == "https://example.org:8443", "without the path, which may contain a token"


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"url": "ftp://example.org/"}, "webhooks.0.url", "http:// or https://"),
        ({"url": "file:///etc/passwd"}, "webhooks.0.url", "http:// or https://"),
        ({"url": "http:///path"}, "webhooks.0.url", "with a host"),
        ({"url": "http://host:99999/"}, "webhooks.0.url", "is not a valid URL"),
        ({"url": "http://host/a b"}, "webhooks.0.url", "no spaces"),
        ({"url": "http://host/\r\nX: y"}, "webhooks.0.url", "is not a valid URL"),
        ({"url": "http://ada:pw@host/"}, "webhooks.0.url", "user name or a password"),
        ({"events": []}, "webhooks.0.events", "at least 1"),
        ({"events": ["Job State"]}, "webhooks.0.events", "must be a type of event"),
        ({"secret": "s3cret-itself"}, "webhooks.0.secret", "must be env:SHOAL_WEBHOOK_SECRET_NAME or file:NAME"),
        ({"secret": "env:HOME"}, "webhooks.0.secret", "must be env:"),
        ({"secret": "file:../shoal.db"}, "webhooks.0.secret", "file:NAME"),
        ({"evnts": []}, "webhooks.0.evnts", "Did you mean 'events'?"),
    ],
)
def test_each_mistake_is_named_with_its_place(change: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        _spec({**HOOK, **change})
    [problem] = error.value.problems
    assert problem.path == path and words in problem.message


def test_a_job_has_at_most_eight() -> None:
    assert len(_spec(*[HOOK] * 8).webhooks) == 8
    with pytest.raises(SpecError, match="at most 8"):
        _spec(*[HOOK] * 9)


def test_hooks_survive_json() -> None:
    spec = _spec(HOOK)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.webhooks == (WebhookSpec.model_validate(HOOK),)
