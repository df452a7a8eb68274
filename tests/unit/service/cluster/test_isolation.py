"""Accounts of `shoal serve --isolate`: what is refused, and in which words."""

import os
import sys
from pathlib import Path

import pytest

from shoal_service.cluster.isolation import Account, IsolationConfig, find_account, isolate
from shoal_service.problems import SettingsError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolate needs Linux")
NOBODY = 65534


def _config(folder: Path, **changes: object) -> IsolationConfig:
    given = {"user": "65534", "gateway_user": "1", "home": folder / "jobs", "state_dir": folder, "checkpoints": None}
    return IsolationConfig(**{**given, **changes})  # type: ignore[arg-type]


def test_without_root_it_says_so_and_what_else_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SettingsError, match=r"only root .* user 1000.*shoal serve --cluster NAME.*shoal join"):
        isolate(_config(tmp_path))


def test_a_user_who_is_not_there_is_named_with_the_command_that_makes_one() -> None:
    with pytest.raises(SettingsError, match=r"isolate_user 'no-such-user'.*useradd --system no-such-user"):
        find_account("isolate_user", "no-such-user", Path("/"))


@pytest.mark.parametrize("name", ["root", "0"])
def test_root_is_no_user_for_jobs(name: str) -> None:
    with pytest.raises(SettingsError, match=f"isolate_user '{name}' has the rights of root"):
        find_account("isolate_user", name, Path("/"))


def test_a_number_without_a_name_is_a_user() -> None:
    user = find_account("isolate_user", "64123", Path("/jobs"), groups=(7,))
    assert (user.uid, user.gid, user.groups) == (64123, 64123, (7,))
    assert user.popen == {"user": 64123, "group": 64123, "extra_groups": [7], "umask": 0o007, "cwd": "/"}


def test_the_environment_of_another_user_has_no_directory_of_this_one() -> None:
    user = Account("jobs", 64123, 64123, Path("/jobs"))
    environment = {"HOME": "/root", "USER": "root", "XDG_RUNTIME_DIR": "/run/user/0", "PATH": "/bin"}
    assert user.adapt_environment(environment) == {"HOME": "/jobs", "USER": "jobs", "LOGNAME": "jobs", "PATH": "/bin"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
class TestAsRoot:
    def test_workers_and_gateway_are_two_users(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match=r"isolate_user '65534' and isolate_gateway_user '65534' are the same"):
            isolate(_config(tmp_path, gateway_user="65534"))

    def test_checkpoints_are_not_below_the_closed_directory(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match=r"checkpoint_url .* is below state_dir .*SHOAL_CHECKPOINT_URL"):
            isolate(_config(tmp_path, checkpoints=tmp_path / "checkpoints"))

    def test_an_interpreter_that_the_user_cannot_run_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "closed").mkdir(mode=0o700)
        (tmp_path / "closed" / "python").symlink_to(sys.executable)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "closed" / "python"))
        with pytest.raises(SettingsError, match=r"cannot run .*closed/python .*Install Shoal where every user"):
            isolate(_config(tmp_path))
        assert (tmp_path / "jobs").stat().st_uid == NOBODY
