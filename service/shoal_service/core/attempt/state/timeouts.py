"""How long an attempt waits for what. The journal keeps them with the state, and tests shorten them."""

from __future__ import annotations

from shoal_workers.contract.base import Frozen


class Timeouts(Frozen):
    """Seconds. Each waiting stage gives up after one of these, so nothing waits without a deadline."""

    quiesce_s: float = 3.0
    """A survivor that has acknowledged the interrupt and has not left `run` by then is killed and replaced. So long are
    others waited for, too, that were asked what lies in their memory."""
    unresponsive_s: float = 0.5
    """A survivor that has not even acknowledged it by then is killed and replaced: stopped, or cut off."""
    silent_s: float = 2.0
    """In a group that hangs: who has not answered a poll for so long is not given that time either. Longer than a poll
    waits for news, by far."""
    unreachable_s: float = 3.0
    """A worker that does not answer for so long is given up, although nothing else speaks against it."""
    absence_s: float = 1.0
    """Without any event, not even a tick, for so long, the supervisor itself was away: the silence of others meanwhile
    says nothing about them."""
    user_error_grace_s: float = 1.0
    """After the first rank's user error the others may raise it too, to be grouped, before they are interrupted."""
    form_s: float = 120.0
    """From `run` to the first news of rank 0; building and restoring included."""
    start_s: float = 600.0
    """Without any warm worker for so long, the attempt gives up."""
    gather_s: float = 15.0
    """The first group waits so long, since the last worker became warm, for those that are still starting."""
    settle_s: float = 3.0
    """A group that could form smaller, or grow, waits so long for workers that are still starting."""
    collective_s: float = 600.0
    """The least that a collective waits for a rank. Progress stamps find what hangs; this is the net for when nobody
    looks at them, and must never break a group whose slowest rank is still getting somewhere."""
    recall_s: float = 15.0
    """For a worker on a node whose memory may hold what no living worker serves; see `recall`."""
    commit_s: float = 120.0
    """For a commit marker, and for the storage to say what it holds."""
    switch_s: float = 900.0
    """From the request to stop until the step boundary; a step, a validation and a save must fit."""
    leave_margin_s: float = 5.0
    """So long before a node goes away, and two steps, the group switches away from it, ready or not."""
