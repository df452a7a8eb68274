"""Rules of a random history that concern supervisors: deaths, stale journals, predecessors that go on, late answers."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kit.worlds.attempt.lives import Entry, Zombie, entry_of, reorder_answers, restart_from
from kit.worlds.attempt.world import World
from shoal_service.core.attempt.messages import Run
from shoal_service.core.attempt.state.parts import Stage


class SupervisorRules(RuleBasedStateMachine):
    """Part of a machine whose `world` is an attempt's."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.entry: Entry | None = None
        """What the journal holds while the head is away; None: the newest."""
        self.zombies: list[Zombie] = []

    @rule()
    def the_supervisor_is_restarted(self) -> None:
        self.world.restart_supervisor()

    @precondition(lambda self: self.world.pending)
    @rule(data=st.data())
    def several_answers_arrive_together(self, data: st.DataObject) -> None:
        pending = sorted(self.world.pending)
        self.world.deliver_together(data.draw(st.lists(st.sampled_from(pending), unique=True, min_size=1)))

    @rule()
    def the_head_goes_away(self) -> None:
        """The journal is stale from now on."""
        self.entry = entry_of(self.world)

    @precondition(lambda self: self.entry is not None and self.world.state.stage is not Stage.ENDED)
    @rule()
    def the_supervisor_is_restarted_with_a_stale_journal(self) -> None:
        entry, self.entry = self.entry, None
        assert entry is not None
        self.zombies.append(Zombie(self.world.state, self.world.now))
        restart_from(self.world, entry)

    @rule(data=st.data(), seconds=st.sampled_from([0.5, 5.0]))
    def a_replaced_supervisor_goes_on(self, data: st.DataObject, seconds: float) -> None:
        """It forms no generation of a number that another one forms."""
        if not self.zombies:
            return
        zombie = data.draw(st.sampled_from(self.zombies))
        formed = zombie.goes_on(data.draw(st.sampled_from(zombie.witnesses())), seconds)
        mine = {c.assignment.generation for c in self.world.commands if isinstance(c, Run)}
        assert mine.isdisjoint(formed)

    @rule(data=st.data())
    def answers_arrive_in_another_order(self, data: st.DataObject) -> None:
        reorder_answers(self.world, lambda items: data.draw(st.permutations(items)))

    @rule(num_orders=st.integers(0, 3))
    def the_supervisor_will_die_before_an_order(self, num_orders: int) -> None:
        """The supervisor dies after it has written the journal and performed some orders of that turn."""
        self.world.dies_after = num_orders
