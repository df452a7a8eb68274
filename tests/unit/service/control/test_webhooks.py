"""The signature is that of Standard Webhooks, and secrets are read as documented."""

import json
from pathlib import Path

import pytest

from shoal_service.control.webhooks import JobFacts, Secrets, SecretUnusable, body_of, headers_of, message_id, signature
from shoal_service.core.events.base import Severity
from shoal_service.views import EventView

NAME = "env:SHOAL_WEBHOOK_SECRET_A"
JOB = JobFacts(id="job-1", name="fish", project="sea", user="ada")


def _secrets(value: str, directory: Path = Path("/nowhere")) -> Secrets:
    return Secrets({"SHOAL_WEBHOOK_SECRET_A": value}, directory)


def test_the_signature_is_that_of_the_published_example() -> None:
    """The example is that of a library for Standard Webhooks."""
    key = _secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").key(NAME)
    body = b'{"test": 2432232314}'
    found = signature("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body, key)
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_headers_name_event_and_time() -> None:
    event = EventView(seq=7, at=1.5, type="job.state", severity=Severity.INFO, message="é", data={"x": float("nan")})
    body = body_of(event, JOB)
    assert json.loads(body) == {
        "id": "job-1_7",
        "job": {"id": "job-1", "name": "fish", "project": "sea", "user": "ada"},
        "seq": 7,
        "at": 1.5,
        "type": "job.state",
        "severity": "info",
        "message": "é",
        "data": {"x": None},
    }
    headers = headers_of(message_id("job-1", 7), body, b"k" * 16, 99.9)
    assert (headers["webhook-id"], headers["webhook-timestamp"]) == ("job-1_7", "99")
    assert headers["webhook-signature"] == signature("job-1_7", 99, body, b"k" * 16)


def test_a_secret_is_text_or_base64() -> None:
    assert _secrets(" sixteen letters! \n").key(NAME) == b"sixteen letters!"


@pytest.mark.parametrize(
    ("value", "reason"), [("short", "fewer than 16 bytes"), ("whsec_%%", "not base64"), ("whsec_AAAA", "fewer than 16")]
)
def test_a_secret_that_cannot_be_used_is_named_and_not_shown(value: str, reason: str) -> None:
    with pytest.raises(SecretUnusable, match=reason) as error:
        _secrets(value).key(NAME)
    assert str(error.value).startswith(f"secret {NAME}: ") and value not in str(error.value)
    assert value not in repr(_secrets(value))


def test_files_and_variables_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff" * 32)
    secrets = Secrets({}, tmp_path)
    with pytest.raises(SecretUnusable, match="no such environment variable"):
        secrets.key(NAME)
    with pytest.raises(SecretUnusable, match="file:a: the file in webhook_secrets_dir: No such file"):
        secrets.key("file:a")
    with pytest.raises(SecretUnusable, match="is not text"):
        secrets.key("file:binary")
