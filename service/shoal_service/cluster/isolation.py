"""Isolation: the accounts of the processes that `shoal serve --isolate` starts, so that the code of jobs does not run
as the server's user, and what these users need.

    server            root                   the database, admin-token, the certificate's key: closed to the others
    gateway           isolate_gateway_user   in the group of the workers, for sockets of Ray; its token is in memory
    Ray, workers      isolate_user           home directory, checkpoints

A process of each user looks at what is open to it: a path may be closed by a directory above it, by an access list or
by a mount. Called by `shoal serve` at its start. Linux only.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal_service.problems import SettingsError

_UMASK = 0o007
"""Ray's sockets get the mode 0770: the gateway is in their group."""
_LOOK_S = 60.0
_LOOK = """
import json, os, sys
from importlib.util import find_spec
try:
    import pydantic, shoal_service, shoal_workers
    for name in ("ray", "torch"):
        open(find_spec(name).origin).close()
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
asked = json.load(sys.stdin)
print(json.dumps({
    "open": [path for path in asked["closed"] if os.access(path, os.X_OK if os.path.isdir(path) else os.R_OK)],
    "shut": [path for path in asked["needed"] if not os.access(path, os.R_OK | os.W_OK | os.X_OK)],
}))
"""
_REMOVE = """
import json, sys
from shoal_workers.snapshot_store.slots.registry import remove_attempts
remove_attempts([tuple(one) for one in json.load(sys.stdin)])
"""
_OTHERWISE = (
    "Or leave isolate out, for people who trust each other; or run a Ray cluster as another user or on other machines, "
    "and let it join: shoal serve --cluster NAME, and there shoal join (docs/install.md)."
)


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this machine with whom processes are started."""

    name: str
    uid: int
    gid: int
    home: Path
    groups: tuple[int, ...] = ()
    """Groups beside that of `gid`."""

    @property
    def popen(self) -> dict[str, Any]:
        """Arguments of `subprocess.Popen`. The directory is one that every user can enter."""
        as_user = {"user": self.uid, "group": self.gid, "extra_groups": list(self.groups)}
        return {**as_user, "umask": _UMASK, "cwd": "/"}

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name}

    def adapt_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the server's user for this account: without that user's directories."""
        shared = {name: value for name, value in environment.items() if not name.startswith("XDG_") and name != "MAIL"}
        return {**shared, **self.environment}


@dataclass(frozen=True, slots=True)
class Isolation:
    """The accounts of Ray with the workers, and of the gateway."""

    workers: Account
    gateway: Account

    def remove_attempts(self, attempts: Sequence[tuple[str, int]]) -> None:
        """Removes what processes of these attempts left in shared memory. It runs as their user, because root must not
        follow their links."""
        if attempts:
            _python(self.workers, _REMOVE, [list(attempt) for attempt in attempts])


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationConfig:
    user: str
    gateway_user: str
    home: Path
    """Home directory of the workers. It is made if it does not exist."""
    state_dir: Path
    checkpoints: Path | None
    """Directory of the checkpoints. It is made if it does not exist. None if checkpoints are not on this machine."""
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """Files and directories that these users must not read, by the name of the setting."""


def isolate(config: IsolationConfig) -> Isolation:
    """Makes the directories of the accounts, and lets processes of theirs look at what is open to them.

    Raises:
        SettingsError
    """
    if sys.platform != "linux":
        raise SettingsError(f"isolate needs Linux, and this is {sys.platform}. {_OTHERWISE}")
    if os.geteuid() != 0:
        raise SettingsError(
            f"isolate: only root starts processes of other users, and this is user {os.geteuid()}. Start the server as "
            f"root. {_OTHERWISE}"
        )
    workers = find_account("isolate_user", config.user, config.home)
    gateway = find_account("isolate_gateway_user", config.gateway_user, Path("/"), groups=(workers.gid,))
    if workers.uid == gateway.uid:
        raise SettingsError(
            f"isolate_user {config.user!r} and isolate_gateway_user {config.gateway_user!r} are the same user, and job "
            "code could become the gateway. Give two users."
        )
    _make("isolate_dir", config.home, workers)
    needed = {"isolate_dir": config.home}
    if config.checkpoints is not None:
        if config.checkpoints.is_relative_to(config.state_dir):
            raise SettingsError(
                f"checkpoint_url {config.checkpoints} is below state_dir {config.state_dir}, which is closed to the "
                f"workers' user {workers.name}. Give another directory (SHOAL_CHECKPOINT_URL); the default is "
                f"{config.home}/checkpoints."
            )
        _make("checkpoint_url", config.checkpoints, workers)
        needed["checkpoint_url"] = config.checkpoints
    closed = {"state_dir": config.state_dir, **config.secrets}
    _look("isolate_user", workers, closed, needed)
    _look("isolate_gateway_user", gateway, closed, {})
    return Isolation(workers, gateway)


def find_account(setting: str, name: str, home: Path, groups: tuple[int, ...] = ()) -> Account:
    """Find a user by name or number. Raises SettingsError."""
    try:
        entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
        account = Account(entry.pw_name, entry.pw_uid, entry.pw_gid, home, groups)
    except KeyError:
        if not name.isdecimal():
            raise SettingsError(
                f"{setting} {name!r}: there is no such user. Make one (useradd --system {name}), or name another."
            ) from None
        account = Account(f"user-{name}", int(name), int(name), home, groups)
    if account.uid == 0 or account.gid == 0 or _is_privileged(account.gid):
        raise SettingsError(f"{setting} {name!r} has the rights of root. Name a user without.")
    return account


def _is_privileged(gid: int) -> bool:
    """Returns whether members of the group can become root, or read its files."""
    try:
        return grp.getgrgid(gid).gr_name in {"root", "wheel", "sudo", "adm", "disk", "shadow", "docker"}
    except KeyError:
        return False


def _make(setting: str, directory: Path, owner: Account) -> None:
    """Makes the directory with this owner, if it does not exist. An existing one keeps its owner: it may have files of
    others."""
    try:
        directory.mkdir(parents=True, mode=0o755)
    except FileExistsError:
        return
    except OSError as error:
        raise SettingsError(f"{setting} {directory} cannot be made: {error.strerror}.") from None
    os.chown(directory, owner.uid, owner.gid)
    directory.chmod(0o700)


def _look(setting: str, user: Account, closed: Mapping[str, Path], needed: Mapping[str, Path]) -> None:
    asked = {
        "closed": [str(closed_path) for closed_path in closed.values()],
        "needed": [str(needed_path) for needed_path in needed.values()],
    }
    try:
        answer = json.loads(_python(user, _LOOK, asked))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = getattr(error, "stderr", None) or error
        raise SettingsError(
            f"{setting} {user.name!r} cannot run {sys.executable} with Shoal's packages: {str(reason).strip()[-300:]}. "
            "Install Shoal where every user can read it, as in /opt/shoal."
        ) from None
    for name, path in closed.items():
        if str(path) in answer["open"]:
            raise SettingsError(
                f"{name} {path} can be read by {user.name} ({setting}). Close it: chown root {path}; chmod go= {path}."
            )
    for name, path in needed.items():
        if str(path) in answer["shut"]:
            raise SettingsError(
                f"{name} {path} cannot be used by {user.name} ({setting}), whose processes write there: chown -R "
                f"{user.name} {path}, and let every user enter the directories above it; or give another one."
            )


def _python(user: Account, program: str, argument: object) -> str:
    """Runs a program that reads JSON, and returns its output. It has nothing of this process's environment but where
    modules are."""
    modules = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(argument),
        capture_output=True,
        text=True,
        check=True,
        timeout=_LOOK_S,
        env={"PATH": os.defpath, **modules, **user.environment},
        **user.popen,
    )
    return done.stdout
