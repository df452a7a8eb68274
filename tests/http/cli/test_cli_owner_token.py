"""The owner's token: rotated while the server runs, and the words of every command once it was revoked."""

import time
from pathlib import Path
from typing import Any

import pytest

from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.access import ADMIN_TOKEN_FILE, parse_token_id


@pytest.fixture
def file(service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The token file of a state directory, with a token that the server knows."""
    monkeypatch.setenv("SHOAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "state").mkdir()
    return ensure_admin_token(service.store, tmp_path / "state", now=time.time())


def test_the_owners_token_is_rotated_as_the_docs_say(service: Any, shoal: Any, file: Path) -> None:
    old = file.read_text().strip()
    assert shoal("token", "create", "owner", "--role", "admin", "--expires", "never", "--output", str(file)).code == 0
    assert shoal("token", "revoke", str(parse_token_id(old))).code == 0
    new = file.read_text().strip()
    assert new != old and shoal("whoami").code == 0 and file.stat().st_mode & 0o777 == 0o600
    assert ensure_admin_token(service.store, file.parent, now=time.time()).read_text().strip() == new, (
        "at the next start"
    )


def test_every_command_says_which_token_was_revoked_and_what_to_do(
    service: Any, shoal: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = file.read_text().strip()
    assert shoal("token", "revoke", str(parse_token_id(old))).code == 0
    for command in (["jobs"], ["token", "list"], ["queue"]):
        refused = shoal(*command)
        assert refused.code == 2 and f"the token of the server's owner, in {file}, is not valid" in refused.err
        assert "revoked" in refused.err and "restart `shoal serve`" in refused.err
    ensure_admin_token(service.store, file.parent, now=time.time())
    assert file.name == ADMIN_TOKEN_FILE and shoal("jobs").code == 0, "as the restart does"
    monkeypatch.setenv("SHOAL_TOKEN", old)
    refused = shoal("jobs")
    assert refused.code == 2 and "the token in SHOAL_TOKEN is not valid" in refused.err and "unset it" in refused.err


def test_a_person_makes_lists_and_revokes_tokens_and_is_logged_out_with_the_own_one(
    service: Any, shoal: Any, file: Path
) -> None:
    ada = shoal("token", "create", "ada", "--role", "viewer", "--personal", "--expires", "2d").out.strip()
    assert shoal("login", "--token", ada).code == 0
    made = shoal("token", "create", "ci", "--expires", "never")
    assert made.code == 0 and "with the token that made it; --expires never is later" in made.err
    listed = {one["name"] for one in shoal("token", "list", "--json").json()}
    assert listed == {"ada", "ada/ci"}
    refused = shoal("token", "create", "more", "--role", "operator")
    assert refused.code != 0 and "role operator may do more than viewer" in refused.err
    assert "you are logged out" not in shoal("token", "revoke", "ci").out
    ended = shoal("token", "revoke", "ada")
    assert ended.code == 0 and "you are logged out" in ended.out
    assert shoal("whoami", "--json").json()["name"] == "bootstrap", "the owner's token of the state directory"
