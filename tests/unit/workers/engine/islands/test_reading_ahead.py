"""Members of a round are read ahead of the one that is summed, on threads that end with the process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from shoal_workers.engine.islands.differences import read_ahead


def test_eight_members_are_read_at_once_and_the_next_begins_when_one_is_summed() -> None:
    eight = threading.Barrier(9)
    begun: list[int] = []

    def read(member: int) -> int:
        begun.append(member)
        if member < 8:
            eight.wait(60)
        return member * member

    reads = read_ahead(read, range(12))
    waiting = threading.Thread(target=eight.wait, args=(60,))
    waiting.start()
    assert next(reads) == (0, 0) and sorted(begun) == [*range(8)]
    assert next(reads) == (1, 1) and next(reads) == (2, 4) and {*begun} <= {*range(10)}
    assert [*reads] == [(member, member * member) for member in range(3, 12)]
    waiting.join()


def test_the_error_of_a_member_is_raised_in_its_turn() -> None:
    def read(member: int) -> int:
        return 6 // member

    reads = read_ahead(read, [3, 2, 0, 1])
    assert [next(reads), next(reads)] == [(3, 2), (2, 3)]
    with pytest.raises(ZeroDivisionError):
        next(reads)


def test_a_read_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    program = """
import threading
from shoal_workers.engine.islands.differences import read_ahead
hangs = threading.Event()
def read(member):
    hangs.set()
    threading.Event().wait()
threading.Thread(target=lambda: [*read_ahead(read, [1, 2])], daemon=True).start()
hangs.wait()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
