"""What grows with the number of workers: how long an answer may take, and how rarely a worker is polled. Pure.

One supervisor talks to all workers. A request to each of them takes some hundred microseconds to send and as long to
receive, so the last of thousands gets it later, and its answer waits behind those of the others. And one process takes
only a limited number of answers a second.

    workers                        4       256      1024      4096
    an answer may take longer by   0       0.4 s    1.9 s     8 s
    a worker is polled every       1 s     1 s      2 s       8 s      (at once when it has something to report)
"""

from __future__ import annotations

from shoal_service.core.attempt.state.attempt import Attempt

AGENTS_FROM = 64
"""Workers of a job from which on agents poll them (supervisor/workers/agent_pool.py), unless set otherwise."""
_ANSWER_S = 0.002
_AT_ONCE = 64
"""Up to this many workers answer in a time that is too short to be counted."""
_POLL_S = 1.0
_POLLS_PER_S = 512


def later_s(num_workers: int) -> float:
    """Seconds by which the answer of one of `num_workers` workers may come later than that of a single worker."""
    return _ANSWER_S * max(0, num_workers - _AT_ONCE)


def quiesce_s(state: Attempt) -> float:
    """Seconds that the workers of a lost group have to leave it, and the others to report their snapshots. A script has
    its grace besides."""
    return state.config.timeouts.quiesce_s + state.target.grace_s + later_s(len(state.pool.workers))


def poll_wait_s(num_workers: int) -> float:
    """Seconds that a poll of a worker waits if the worker has nothing to report."""
    return max(_POLL_S, num_workers / _POLLS_PER_S)
