"""The owner of a lease, and whether its process has certainly ended."""

import os
import subprocess
import sys

import pytest

from shoal_service.control import ownership


def _name_of_another() -> tuple[subprocess.Popen[str], str]:
    code = "from shoal_service.control.ownership import own_name; print(own_name(), flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_killed_process_has_ended_even_before_it_is_reaped() -> None:
    process, name = _name_of_another()
    with process:
        assert not ownership.is_gone(name)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ownership.is_gone(name)
    assert ownership.is_gone(name)


def test_this_process_is_alive() -> None:
    assert not ownership.is_gone(ownership.own_name())


def test_another_process_of_the_same_pid_is_not_the_owner() -> None:
    host, pid, place, start = ownership.own_name().rsplit("-", 3)
    assert ownership.is_gone(f"{host}-{pid}-{place}-{int(start) - 1}")


@pytest.mark.parametrize("name", ["", "owner", "host-99999999-abcdefab-12", "host-x-y-z", "a-b"])
def test_owners_on_other_hosts_are_unknown(name: str) -> None:
    assert not ownership.is_gone(name)
