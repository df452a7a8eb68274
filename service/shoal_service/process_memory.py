"""Closes the memory and the environment of this process to the other processes of its user.

Called by `shoal serve` at its start: the workers of an embedded cluster run code of users as the same user, and the
password of the database is in this process. The kernel lets a process that is "not dumpable" be read, in /proc or with
ptrace, by root only. It writes no core dump, and py-spy needs root.
"""

from __future__ import annotations

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def hide_process() -> bool:
    """Hides this process. False: this system has no such protection. A process that this one executes is readable
    again."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0)
