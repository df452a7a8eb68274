"""The thread that waits in the place of the training thread keeps nothing of what it has waited for."""

from __future__ import annotations

import weakref
from typing import Any

from shoal_workers.engine.group.collectives import _WaitingThread


class _Operation:
    """Stands for a collective and its tensors, which live as long as it does."""


def test_an_operation_is_freed_once_it_was_waited_for() -> None:
    thread, operation = _WaitingThread(), _Operation()
    freed = weakref.ref(operation)

    def plain_wait(work: Any) -> bool:
        return work is freed()

    thread.wait(plain_wait, operation, lambda: None)  # type: ignore[arg-type]
    del operation
    assert freed() is None
    thread.end()
