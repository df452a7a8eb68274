"""What a program of the user's own imports: `shoal.run(train)` runs its loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal_workers.engine.loop.run import Run

__all__ = ["run"]


def run(train: Callable[[Run], None]) -> None:
    """Calls `train(run)` whenever the group of workers changes, until it returns.

    Under the service the worker calls it; this call does not return there. Elsewhere, also under torchrun, it trains in
    this process, and returns when the loop has.
    """
    from shoal_workers.engine.loop.entry import Captured, is_capturing

    if is_capturing():
        raise Captured(train)
    from shoal_workers.standalone import run_loop

    run_loop(train)
