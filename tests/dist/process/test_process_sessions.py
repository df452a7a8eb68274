"""What the processes of a session have started in sessions of their own ends with them."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from shoal_service.cluster.embedded_node import end_session

pytestmark = pytest.mark.dist

_LEADER = """
import subprocess, sys
sleeping = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
print(subprocess.Popen(sleeping, start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)
input()
"""


def test_a_session_ends_with_what_it_has_started_in_other_sessions() -> None:
    command = [sys.executable, "-I", "-S", "-c", _LEADER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        child = os.pidfd_open(int(leader.stdout.readline()))
        end_session(leader.pid)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    assert poll.poll(60_000)
    os.close(child)
