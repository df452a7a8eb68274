"""The table of a profile: where a step's time goes, once the trace is known. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_workers.contract.profiling.messages import Category, StepTimes


def corrected(times: Sequence[StepTimes], unseen_s: Sequence[float]) -> tuple[StepTimes, ...]:
    """Moves communication that only the trace shows out of the time of computing. A step's length does not change.

    Args:
        unseen_s: for each step, see `trace.unseen_communication`.
    """
    return tuple(_moved(one, extra_s) for one, extra_s in zip(times, unseen_s, strict=True))


def _moved(times: StepTimes, extra_s: float) -> StepTimes:
    moved_s = min(extra_s, times.seconds[Category.COMPUTE])
    seconds = {
        **times.seconds,
        Category.COMPUTE: times.seconds[Category.COMPUTE] - moved_s,
        Category.COMMUNICATION: times.seconds[Category.COMMUNICATION] + moved_s,
    }
    return times.model_copy(update={"seconds": seconds})
