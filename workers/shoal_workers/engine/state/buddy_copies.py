"""Which step's copies have arrived at every buddy, and what sending them costs. Pure; called by `Snapshots`.

After the loss of a node only a step of which every rank has a copy elsewhere can be restored. Each rank contributes the
step of its newest copy to the vote. The step counts once all ranks contribute the same one. It stays whole until the
next one is, because senders and buddies keep it when a later copy of only some ranks arrives. If there is no memory for
that, a rank drops its own part, and says so in the next vote: then no step is whole until the next one is.

    rank 0     4 arrived   8 arrived  12 arrived
    rank 1     4 arrived   8 failed   12 arrived
    whole      4           4          12
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal_workers.engine.step.vote import NO_BUDDY, NOTHING_ARRIVED
from shoal_workers.snapshot_store.transfer.sender import SendCost


class BuddyCopies:
    """The copies of one generation. Training thread only."""

    def __init__(self, generation: int, *, has_buddy: bool) -> None:
        self._generation = generation
        self._arrived_step = NOTHING_ARRIVED if has_buddy else NO_BUDDY
        self.whole_step: int | None = None
        """Newest step of which every rank's copy has arrived; equal on all ranks."""
        self.flight_steps = 1
        """Completed steps between the whole step and the vote in which it became whole: the most of this generation."""
        self._local_copy_s = 0.0
        self._are_expected = True
        self._dropped_step = -1
        """Newest whole step of which a rank has dropped its own part since."""

    def arrived_step(self, *, holds_whole: bool = True) -> float:
        """For the ballot. `holds_whole`: the memory of this rank still has its own part of the whole step."""
        return self._arrived_step if holds_whole else NOTHING_ARRIVED

    @property
    def are_lacking(self) -> bool:
        """Copies are expected, and none is whole yet: after the loss of a node the snapshot before is needed."""
        return self._are_expected and self.whole_step is None

    def copied(self, seconds: float) -> None:
        """A copy was made in order to be sent; its cost is counted as part of the cost of its send."""
        self._local_copy_s = seconds

    def sent(self, cost: SendCost | None) -> float:
        """`cost`: of the send that has ended since the last vote. Returns its CPU seconds; 0: nothing has arrived.

        A send of an earlier generation may end in this one. It is neither a cost nor a copy of this one."""
        if cost is None or cost.generation != self._generation:
            return 0.0
        self._arrived_step = float(cost.step)
        local_copy_s, self._local_copy_s = self._local_copy_s, 0.0
        return local_copy_s + cost.cpu_s

    def voted(self, arrived_steps: Sequence[float], step: int) -> None:
        """`arrived_steps`: of all ranks; `step`: the completed one."""
        arrived = {at for at in arrived_steps if at != NO_BUDDY}
        self._are_expected = bool(arrived)
        if NOTHING_ARRIVED in arrived and self.whole_step is not None:
            self._dropped_step, self.whole_step = self.whole_step, None
        if len(arrived) != 1 or NOTHING_ARRIVED in arrived:
            return
        whole = int(arrived.pop())
        if whole != self.whole_step and whole > self._dropped_step:
            self.whole_step = whole
            self.flight_steps = max(self.flight_steps, step - whole)
