"""Rules of a random history in which a job loses its newest state and trains the same steps again, with more losses."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kit.worlds.attempt.world import World
from shoal_service.core.attempt.state.parts import Stage

_NUM_LOST = 18
"""Steps that are trained and lost: as many as the breaks that follow can have between them."""


class SetbackRules(RuleBasedStateMachine):
    """Part of a machine whose `world` is an attempt's."""

    world: World

    @precondition(lambda self: self.world.state.target.keeps_snapshots and self._is_at_most_half_done)
    @rule(steps=st.lists(st.integers(1, 2), min_size=8, max_size=9))
    def everything_newer_is_lost_and_it_advances_from_break_to_break(self, steps: list[int]) -> None:
        """All nodes die with what was in memory only. The steps are those before each break."""
        self._recover()
        self._train(_NUM_LOST)
        for node_id in {worker.node_id for worker in self.world.workers.values() if worker.alive}:
            self.world.die_node(node_id)
        self._recover()
        for num_steps in steps:
            self._train(num_steps)
            if self._trains:
                self.world.break_collectives()
            self._recover()

    @property
    def _is_at_most_half_done(self) -> bool:
        return (
            self.world.state.stage is not Stage.ENDED and 2 * self.world.state.progress.step <= self.world.total_steps
        )

    @property
    def _trains(self) -> bool:
        return self.world.state.stage is Stage.RUNNING and self.world.is_whole

    def _train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self._trains:
                self.world.train(1, save_every=1000)
                self.world.deliver_all()

    def _recover(self) -> None:
        self.world.deliver_all()
        self.world.until(Stage.RUNNING, Stage.ENDED)
