"""How a group ends: the interpreter waits for the last references to it, unless an operation was lost."""

from __future__ import annotations

import threading

import pytest

from shoal_workers.engine.group import process_group


class SlowGroup:
    """Its destructor waits for an operation, as that of a process group may."""

    def __init__(self, may_end: threading.Event) -> None:
        self.may_end = may_end

    def __del__(self) -> None:
        self.may_end.wait()


@pytest.mark.parametrize("is_clean", [True, False])
def test_an_interpreter_waits_for_groups_that_end_cleanly_only(is_clean: bool) -> None:
    """Else Python would end the thread as it comes back from the destructor, which terminates the process."""
    may_end = threading.Event()
    process_group._drop([SlowGroup(may_end)], None, None if is_clean else lambda: None)  # type: ignore[list-item]
    [reaper] = [thread for thread in threading.enumerate() if thread.name == "shoal-group-reaper"]
    assert reaper.daemon is not is_clean
    may_end.set()
    reaper.join()
