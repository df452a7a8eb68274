"""How long the training thread was ready to run and had no CPU: the evidence that other programs use its cores."""

from __future__ import annotations

import os
import threading


class CpuWait:
    """Made and read on the thread that it measures. Where the kernel does not tell (no Linux), it is always 0."""

    def __init__(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        self._taken = self.seconds()

    def take(self) -> float:
        """Seconds since the last call, or since it was made."""
        before, self._taken = self._taken, self.seconds()
        return self._taken - before

    def seconds(self) -> float:
        """Since the thread began."""
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
