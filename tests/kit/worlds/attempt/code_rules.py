"""What may happen to the code of a job at any time, as rules for hypothesis: another version, and one that fails."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kit.worlds.attempt.parts import error_of
from kit.worlds.attempt.supervisor_rules import SupervisorRules
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.messages import ExitKind


class CodeRules(SupervisorRules):
    @rule(version=st.sampled_from(["", "a" * 64, "b" * 64]), difference=st.sampled_from(["", "", "weight is new"]))
    def the_code_is_updated(self, version: str, difference: str) -> None:
        self.world.difference = difference
        self.world.direct(code=version)

    @precondition(lambda self: self.world.is_whole and self.world.state.code.trial is not None)
    @rule(kind=st.sampled_from([ExitKind.USER_ERROR, ExitKind.NON_FINITE]))
    def the_new_code_fails(self, kind: ExitKind) -> None:
        if self.world.state.stage is Stage.RUNNING and not self.world.pending:
            for worker in self.world.group():
                self.world.leave(worker, kind, error_of("ValueError", "a new mistake"))

    @invariant()
    def a_group_has_one_version_of_the_code(self) -> None:
        state = self.world.state
        workers = [state.pool.worker(index) for index in state.group.workers]
        if state.stage in (Stage.FORMING, Stage.RUNNING, Stage.SWITCHING):
            assert {worker.code for worker in workers if worker is not None} <= {state.code.current}
