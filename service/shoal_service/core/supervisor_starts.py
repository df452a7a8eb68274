"""Decides whether a supervisor that does not get to record its start is started again. Pure.

    its actor cannot be created            start it again after 1, 2, 4 and 8 s; five failures end the attempt
    its process dies, Ray starts another   nine processes in a row that recorded no start end the attempt
    its driver meets an unexpected error   drive it again after 1, 2, 4 ... 30 s; eight without a report end the attempt

A supervisor that has recorded its start in the journal decides about itself, see supervisor/supervisor.py. This one
cannot: it died while its process was set up, or its node lacks what it needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_service.core.quantities import count_text
from shoal_workers.contract import EndReason, backoff_s

MAX_FAILED_STARTS = 5
MAX_DRIVER_ERRORS, _MAX_PAUSE_S = 8, 30.0
MAX_UNRECORDED_STARTS = 8
"""This is as many as `supervisor.MAX_SHORT_RUNS`."""


_NODE = re.compile(r"\(IP: ([^,)]+)")
_USE = re.compile(r"\bwas ([\d.]+)GB used / ([\d.]+)GB limit")
_THRESHOLD = re.compile(r"exceeded threshold of \d+B \(([\d.]+)%")


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process of a supervisor has ended that Ray has replaced."""

    is_out_of_memory: bool
    """Ray's memory monitor has killed it, because its node ran low on memory."""
    words: str
    """Ray's; they have the numbers."""


@dataclass(frozen=True, slots=True)
class StartDecision:
    again: bool
    after_s: float
    """Pause before the next start; 0 if there is none."""
    reason: str
    end: EndReason = EndReason.INTERNAL
    """End of the attempt, unless the supervisor is started again."""


def after_failure(num_failed: int, error: str) -> StartDecision:
    """Decide after a failed start. `num_failed`: failed starts in a row, this one included."""
    if num_failed >= MAX_FAILED_STARTS:
        return StartDecision(
            False, 0.0, f"the supervisor could not be started {count_text(num_failed, 'time')} in a row: {error}"
        )
    after_s = backoff_s(num_failed, first_s=1.0)
    return StartDecision(True, after_s, f"start {num_failed} of at most {MAX_FAILED_STARTS} failed: {error}")


def after_error(num_errors: int, error: str) -> StartDecision:
    """Decide after an unexpected error of the attempt's driver.

    Args:
        num_errors: errors since the supervisor has reported, this one included.
    """
    if num_errors >= MAX_DRIVER_ERRORS:
        times = count_text(num_errors, "time")
        return StartDecision(False, 0.0, f"the control plane failed {times} in a row to drive the attempt: {error}")
    reason = f"error {num_errors} of at most {MAX_DRIVER_ERRORS} in a row: {error}"
    return StartDecision(True, pause_s(num_errors), reason)


def pause_s(num_errors: int) -> float:
    return backoff_s(num_errors, first_s=1.0, longest_s=_MAX_PAUSE_S)


def while_unanswered(num_unrecorded: int, known_before: int, ends: Sequence[ProcessEnd] = ()) -> StartDecision:
    """Decide whether Ray may go on starting it.

    Args:
        num_unrecorded: processes of this supervisor that were started and have not recorded it, in all.
        known_before: the same, when it last answered.
        ends: how its last processes have ended, if that is known.
    """
    num_in_a_row = num_unrecorded - known_before
    if num_in_a_row > MAX_UNRECORDED_STARTS:
        why = describe_lack_of_memory(ends)
        return StartDecision(
            False,
            0.0,
            f"the supervisor's process died {count_text(num_in_a_row - 1, 'time')} in a row before it recorded its "
            f"start. {why or 'See the logs of the Ray workers on its node.'}",
            EndReason.WORKERS_FAILED if why else EndReason.INTERNAL,
        )
    return StartDecision(True, 0.0, f"{num_in_a_row} of at most {MAX_UNRECORDED_STARTS} starts are not recorded")


def describe_lack_of_memory(ends: Sequence[ProcessEnd]) -> str:
    """Explain the ends for the user if most of these processes were killed for lack of memory; else empty."""
    killed = [end.words for end in ends if end.is_out_of_memory]
    if 2 * len(killed) <= len(ends):
        return ""
    node, use, threshold = (pattern.search(killed[-1]) for pattern in (_NODE, _USE, _THRESHOLD))
    numbers = f" ({use[1]} of {use[2]} GB in use, Ray allows {threshold[1]} %)" if use and threshold else ""
    return (
        f"Ray's memory monitor killed {len(killed)} of its last {count_text(len(ends), 'process')}, because its node"
        f"{f' {node[1]}' if node else ''} had no memory left{numbers}. Free memory there, let fewer workers share a "
        "node (worker.memory_gib reserves memory for each), or take the node out of use with `shoal drain`."
    )
