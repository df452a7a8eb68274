import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from shoal_service.problems import SettingsError
from shoal_service.settings import Settings, load_settings, take_webhook_secrets
from shoal_workers.contract.log_settings import LogFormat, LogLevel, LogSettings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"SHOAL_{name.upper()}", raising=False)


def test_all_paths_are_below_the_state_directory_by_default(tmp_path: Path) -> None:
    settings = load_settings(state_dir=tmp_path)
    assert settings.database_url == f"sqlite:///{tmp_path}/shoal.db"
    assert settings.checkpoint_url == str(tmp_path / "checkpoints")
    assert load_settings(state_dir=tmp_path, checkpoint_url="s3://b/c").checkpoint_url == "s3://b/c"


def test_the_service_listens_on_loopback_by_default() -> None:
    settings = load_settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8470)


def test_the_environment_is_read_and_arguments_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_PORT", "9000")
    monkeypatch.setenv("SHOAL_LOG_LEVEL", "debug")
    monkeypatch.setenv("SHOAL_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("SHOAL_DATABASE_URL", "")
    settings = load_settings(port=9001)
    assert (settings.port, settings.log_level, settings.state_dir) == (9001, LogLevel.DEBUG, tmp_path)
    assert settings.database_url == f"sqlite:///{tmp_path}/shoal.db"


def test_a_relative_state_directory_is_made_absolute() -> None:
    assert load_settings(state_dir="somewhere").state_dir == Path.cwd() / "somewhere"


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": 70000}, "port 70000"),
        ({"lease_ttl_s": 1}, "lease_ttl_s 1"),
        ({"log_level": "loud"}, "log_level 'loud'"),
        ({"prt": 1}, "prt 1"),
        ({"state_dir": 5}, "state_dir 5"),
        ({"ray_address": "h:1", "nodes": 2}, "Give one or the other"),
        ({"ray_address": "h:1", "num_cpus": 2}, "Give one or the other"),
        ({"cluster": "East"}, "cluster 'East'"),
        (
            {"cluster_token_file": "/run/t"},
            "cluster_token_file /run/t has the token of a cluster that joins: name that",
        ),
    ],
)
def test_settings_that_cannot_work_are_named_with_their_value(given: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(**given)
    assert message in str(error.value)


def test_the_log_format_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().logs == LogSettings(level=LogLevel.INFO, format=LogFormat.TEXT)
    monkeypatch.setenv("SHOAL_LOG_FORMAT", "json")
    assert load_settings().logs.format is LogFormat.JSON
    with pytest.raises(SettingsError, match="log_format 'xml'"):
        load_settings(log_format="xml")


HOOK = {"name": "ops", "url": "https://example.org/", "secret": "env:SHOAL_WEBHOOK_SECRET_A"}


def test_webhooks_come_from_the_environment_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_WEBHOOKS", json.dumps([HOOK | {"events": ["job.*"]}]))
    settings = load_settings(state_dir=tmp_path)
    [hook] = settings.webhooks
    assert (hook.name, hook.events) == ("ops", ("job.*",))
    assert settings.webhook_secrets_dir == tmp_path / "webhook-secrets"


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ([HOOK, HOOK], "the same name"),
        ([HOOK | {"events": ["job.stat"]}], "webhook ops: no event has the type job.stat"),
        ([HOOK | {"secret": "abc"}], "must be env:SHOAL_WEBHOOK_SECRET_NAME"),
    ],
)
def test_a_webhook_that_cannot_work_is_refused(hooks: list[dict[str, object]], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load_settings(webhooks=hooks)


def test_processes_that_the_service_starts_do_not_inherit_the_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_WEBHOOK_SECRET_A", "sixteen letters!")
    monkeypatch.setenv("SHOAL_WEBHOOK", "another variable")
    assert take_webhook_secrets() == {"SHOAL_WEBHOOK_SECRET_A": "sixteen letters!"}
    assert "SHOAL_WEBHOOK_SECRET_A" not in os.environ and os.environ["SHOAL_WEBHOOK"] == "another variable"


def test_secrets_are_read_from_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "shoal_database_url").write_text("postgresql://shoal:secret@db/shoal\n")
    (tmp_path / "ray_auth_token").write_text("of another program")
    monkeypatch.setenv("SHOAL_SECRETS_DIR", str(tmp_path))
    assert load_settings().database_url == "postgresql://shoal:secret@db/shoal"
    monkeypatch.setenv("SHOAL_DATABASE_URL", "sqlite:////here/shoal.db")
    assert load_settings().database_url == "sqlite:////here/shoal.db"


def test_a_directory_of_secrets_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_SECRETS_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match=r"SHOAL_SECRETS_DIR .*nowhere' is not a directory"):
        load_settings()


def test_with_isolate_jobs_write_outside_of_the_state_directory(tmp_path: Path) -> None:
    settings = load_settings(state_dir=tmp_path, isolate=True, isolate_dir=tmp_path / "jobs")
    assert settings.checkpoint_url == str(tmp_path / "jobs" / "checkpoints")
    assert load_settings(isolate=True).isolate_dir == Path("/var/lib/shoal-jobs")


@pytest.mark.parametrize("given", [{"cluster": "east"}, {"ray_address": "h:1"}])
def test_isolate_is_about_the_cluster_that_the_server_starts(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="isolate is about the cluster that the server starts"):
        load_settings(isolate=True, **given)
