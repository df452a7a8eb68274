"""Processes of other users than root, who runs the tests: their interpreter, and directories that they can enter.

A user's Python is often below a home directory that others cannot enter. So `reachable_python` makes a program that
opens the way in a mount namespace of its own, which its children inherit and no other process sees.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.requirements import missing

NOBODY = 65534


def needs_root() -> None:
    """Skips the test unless this process can start those of other users, and make mounts that only they see; fails it
    where SHOAL_REQUIRE lists `users`."""
    if sys.platform != "linux" or os.geteuid() != 0:
        missing("users", "only root starts processes of other users")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        missing("users", "this machine allows no mount namespace")


@contextmanager
def open_directory(prefix: str) -> Iterator[Path]:
    """A directory that every user can enter; those of pytest are closed."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def reachable_python(python: Path, folder: Path, *, user: str = "") -> Path:
    """A program in `folder` that is `python`, also for other users and whatever they start.

    `user`: numbers UID:GID[,GID...] that the process has; empty: root.
    """
    program = folder / f"python-{user.replace(':', '-').replace(',', '-') or 'root'}"
    lines = ["#!/bin/sh", "set -e", f"stash=$(mktemp -d {folder}/stash-XXXX)"]
    closed = {one: _topmost_closed(one) for one in (Path(sys.base_prefix).resolve(), python.parent.parent.absolute())}
    for number, path in enumerate(one for one, top in closed.items() if top):
        lines += [f"mkdir $stash/{number}", f"mount --bind {shlex.quote(str(path))} $stash/{number}"]
    lines += [f"mount -t tmpfs -o mode=0755 tmpfs {top}" for top in dict.fromkeys(closed.values()) if top]
    for number, path in enumerate(one for one, top in closed.items() if top):
        lines += [f"mkdir -p {shlex.quote(str(path))}", f"mount --bind $stash/{number} {shlex.quote(str(path))}"]
    run = shlex.quote(str(python.absolute()))
    if user:
        uid, _, gids = user.partition(":")
        gid, _, others = gids.partition(",")
        groups = f"--groups {others}" if others else "--clear-groups"
        run = f"setpriv --reuid {uid} --regid {gid} {groups} {run}"
    inner = folder / f"{program.name}.sh"
    inner.write_text("\n".join([*lines, f'exec {run} "$@"', ""]))
    program.write_text(f'#!/bin/sh\nexec unshare --mount sh {inner} "$@"\n')
    program.chmod(0o755)
    return program


def _topmost_closed(path: Path) -> Path | None:
    """The highest directory on the way that other users cannot enter."""
    return next((one for one in (*reversed(path.parents), path) if not one.stat().st_mode & 0o001), None)
