"""Processes that start in 20 ms, because a zygote that has torch and the engine imported forks them.

`warm_python()` is the path of an executable that stands in a command in place of `sys.executable`. All its processes
come from one zygote for the session. What a test says about the start of an interpreter it says about `sys.executable`.
"""

import marshal
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kit.device import ON_GPU

_HERE = Path(__file__).parent
_END_S = 60.0
_DYING_S = 5.0


class Zygote:
    """One zygote."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        """`prefix`: stands before its command, and so decides where all its processes run."""
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-warm-")
        self.python = Path(self._folder.name) / "python"
        self._address = f"{self.python}.socket"
        self.python.write_text(f"#!{sys.executable} -IS\n{(_HERE / 'warm_python.py').read_text()}")
        self.python.chmod(0o700)
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if ON_GPU:
            self.environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        self._errors = Path(self._folder.name) / "errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, str(_HERE / "zygote.py"), self._address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self.environment,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", self._errors.read_text()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> int:
        """Starts a process that no command waits for; returns its pid. OSError: the zygote starts no process."""
        variables = {os.fsencode(k): os.fsencode(v) for k, v in (environment or self.environment).items()}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, Path(os.devnull).open("r+b") as null:
            connection.connect(self._address)
            request = marshal.dumps((arguments, variables, str(Path.cwd()), [0, 1, 2], True))
            socket.send_fds(connection, [request], [null.fileno(), null.fileno(), 2])
            pid = connection.recv(32)
        if not pid.isdigit():
            with suppress(subprocess.TimeoutExpired):  # it closes its connections before it has ended
                self._process.wait(_DYING_S)
            raise ConnectionError(
                f"the zygote (exit status {self._process.poll()}) answers {pid!r} in place of a pid. "
                f"Its errors: {self._errors.read_text() or 'none'}"
            )
        return int(pid)

    def close(self) -> None:
        """Its processes end too."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_END_S)
        self._process.stdout.close()
        self._folder.cleanup()


_shared: list[Zygote] = []


def shared_zygote() -> Zygote:
    """That of the session. The first call starts it, and so does one after it has died."""
    if _shared and not _shared[0].is_alive:
        close_shared_zygote()
    if not _shared:
        _shared.append(Zygote())
    return _shared[0]


def close_shared_zygote() -> None:
    while _shared:
        _shared.pop().close()


def warm_python() -> str:
    return str(shared_zygote().python)
