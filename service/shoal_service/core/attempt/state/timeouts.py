"""How long an attempt waits, for each thing that it waits for, and what large groups add. The journal keeps the
timeouts with the state; tests shorten them.

One supervisor talks to all workers. A request to each of them takes some hundred microseconds to send and as long to
receive, so the last of thousands gets it later, and its answer waits behind those of the others. And one process takes
only a limited number of answers a second.

    workers                        4       256      1024      4096
    an answer may take longer by   0       0.4 s    1.9 s     8 s
    a worker is polled every       1 s     1 s      2 s       8 s      (at once when it has something to report)
"""

from __future__ import annotations

from shoal_workers.contract import Frozen, TimeoutsSpec

AGENTS_FROM = 64
"""Workers of a job from which on agents poll them (supervisor/workers/agent_pool.py), unless set otherwise."""
_ANSWER_S = 0.002
_AT_ONCE = 64
"""Up to this many workers answer in a time that is too short to be counted."""
_POLL_S = 1.0
_POLLS_PER_S = 512


class Timeouts(Frozen):
    """The timeouts of an attempt, in seconds. Each waiting stage ends after one of them, so no stage waits without a
    deadline. The user may set some of them in the spec. Workers of large groups may take longer to answer, see
    `later_s`."""

    quiesce_s: float = 3.0
    """A worker of a lost group that has acknowledged the interrupt but has not left `run` within this time is killed
    and replaced. Also the deadline for other workers to report their snapshots."""
    unresponsive_s: float = 2.0
    """A worker that has not acknowledged the interrupt within this time is killed and replaced: it is stopped, or cut
    off. A death makes its host busy for a moment: with 0.5 s, workers were killed that only waited for CPU time."""
    silent_s: float = 2.0
    """A worker of a group that hangs is killed without waiting for unresponsive_s if it has left its polls unanswered
    for this long. Much longer than a poll waits for reports."""
    unreachable_s: float = 3.0
    """A worker to which calls have failed for this long is given up, even if nothing else indicates a fault."""
    left_out_s: float = 60.0
    """A worker on a node that is silent for this long is given up, if Ray has not declared the node dead before."""
    absence_s: float = 0.5
    """Two ticks of the supervisor. If it handled no event for longer, it did not run, and workers are not to blame for
    that: the deadlines move, see `deadlines.extend_after_suspend`."""
    user_error_grace_s: float = 1.0
    """Time after a rank's error in which another rank may raise it too, before the rest is interrupted."""
    form_s: float = 120.0
    """Time without progress, from `run` to the first report of rank 0, which includes building the model."""
    restore_s: float = 300.0
    """Time without progress while a rank reads its state."""
    start_s: float = 600.0
    """An attempt with fewer than elasticity.min_workers warm workers ends if no worker that starts makes progress for
    this long."""
    save_s: float = 120.0
    """A save in which the storage accepts nothing for this long is given up by the worker."""
    gather_s: float = 15.0
    """The first group waits this long, from the last worker that became warm, for those that are still starting."""
    settle_s: float = 3.0
    """The same time for a later group, and for a group that could grow."""
    collective_s: float = 600.0
    """The least time that a collective waits for a rank. Hangs are found by progress stamps; this deadline applies if
    no supervisor reads them, and must never end a group whose slowest rank still makes progress."""
    orphans_s: float = 15.0
    """Time for a worker on a node whose memory may hold snapshots that no live worker serves; see
    memory_snapshots.py."""
    commit_s: float = 120.0
    """Time to write a commit marker."""
    switch_s: float = 900.0
    """Time from the request to stop until the step boundary; a step, a validation and a save must fit."""
    leave_margin_s: float = 5.0
    """The group switches away from a node this long, plus two steps, before the node goes away."""

    level_trial_s: float = 300.0
    """A group that has trained this long tries the shard levels that may be faster; see `switching`."""

    def with_spec(self, spec: TimeoutsSpec) -> Timeouts:
        """These timeouts with the values that the user has set."""
        return self.model_copy(update=spec.model_dump())

    def later_s(self, num_workers: int) -> float:
        """Return `later_s`; the twin, whose machine sees a sample of the workers, counts those that it leaves out."""
        return later_s(num_workers)


def later_s(num_workers: int) -> float:
    """Seconds by which the answer of one of `num_workers` workers may come later than that of a single worker."""
    return _ANSWER_S * max(0, num_workers - _AT_ONCE)


def poll_wait_s(num_workers: int) -> float:
    """Seconds that a poll of a worker waits if the worker has nothing to report."""
    return max(_POLL_S, num_workers / _POLLS_PER_S)
