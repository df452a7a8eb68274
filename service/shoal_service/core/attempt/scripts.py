"""Rules about how groups end: `TaskRules`, and `ScriptRules` for a script, which the machine does not see into. Pure.

A script has its own checkpoints, so nothing of it is saved, restored or proven here, and no step of it is known until
it reports one:

    a group has formed    its first step is not known: what the groups before had completed is kept
    first report          says where the script has gone on: lost steps are counted, and the incident closes
    no report ever        the incident closes once the group has formed
    LONG_S of running     the loss of a worker after it is no loss at the start
    TIMES groups in a row that the program itself has ended at the same place, without a new step or a file with new
                          content: the attempt ends, however long they ran. The loss of a worker or of a node, and
                          what ends while a worker has to leave, does not count
    every rank has ended  with status 0: the job is done; on request: the script is started again, or the attempt ends
"""

from __future__ import annotations

import re

from shoal_service.core.attempt.state import LONG_S, Attempt, Crash
from shoal_service.core.endings import REPEATED, sentence_with_ranks
from shoal_service.core.quantities import count_text, ranks_text
from shoal_workers.contract import (
    ExitKind,
    IncidentCause,
    Phase,
    SnapshotSource,
    StateSource,
    UserFailure,
    WorkerExit,
    is_exhausted,
    why_exhausted,
)

TIMES = 3
"""Groups in a row that may end in the same way without progress."""
CRASH = "crash"
"""Value of `ErrorReport.mistake` and `UserFailure.mistake`: a process was killed by a signal that it caused itself."""
_PACKAGE = re.compile(r"/\S*/_ray_pkg_[0-9a-f]+/")
"""Where Ray unpacks a job's code: in a traceback its paths begin at the directory of the code."""


class TaskRules:
    """Rules for a task or a loop, whose steps and checkpoints the machine sees."""

    no_progress = "completed no step"

    def left_together(self, exits: tuple[WorkerExit, ...]) -> bool:
        """True if ranks that have left as planned have done so at the same boundary."""
        return len({(e.kind, e.step) for e in exits}) == 1

    def raised(self, state: Attempt) -> list[WorkerExit]:
        """List the exits with errors that decide the outcome, without those of workers that were replaced."""
        return [e for index, e in state.group.exits.items() if e.error is not None and state.pool.worker(index)]

    def failure(self, exits: tuple[WorkerExit, ...]) -> UserFailure:
        """Return the error that ends the attempt."""
        return most_frequent(exits)

    def end_by_error(
        self, state: Attempt, exits: tuple[WorkerExit, ...], *, is_repeated: bool
    ) -> tuple[str, UserFailure]:
        """Return the message and the failure of an attempt that ends with these exits."""
        failure = self.failure(exits)
        return failure.sentence, failure

    def count_end(self, state: Attempt) -> tuple[Crash | None, UserFailure | None]:
        """Return the record of how programs have ended, with the end of this group; and the failure that ends the
        attempt, if this is the last end that is allowed."""
        return None, None

    def find_source(
        self, state: Attempt, memory: SnapshotSource | None, checkpoint_url: str | None
    ) -> tuple[StateSource | None, int]:
        """Return where the state of the next group comes from, and its step."""
        if memory is not None:
            return StateSource.MEMORY, memory.step
        return StateSource.CHECKPOINT if checkpoint_url else StateSource.INITIAL, state.checkpoints.durable_step

    def describe_save(self, state: Attempt) -> str:
        """Return the message of an attempt that has saved its state and ends."""
        saved, step = state.checkpoints.durable_step, state.progress.step
        return f"saved at step {saved}" + (f" of {step}" if step > saved else "") + "."

    def describe_finish(self, state: Attempt) -> str:
        """Return the message of an attempt that is done."""
        step, standing, rule = state.progress.step, state.history.standing, state.target.spec.validation
        if standing is not None and is_exhausted(standing, rule) and step == standing.judged_step:
            return f"stopped early after {count_text(step, 'step')}: {why_exhausted(standing, rule)}"
        return f"finished after {count_text(step, 'step')}"


class ScriptRules(TaskRules):
    """Rules for a script: it calls its collectives itself, and says in its own ways that a peer is gone."""

    no_progress = f"reported no new step and ran for less than {LONG_S:g} s"

    def left_together(self, exits: tuple[WorkerExit, ...]) -> bool:
        """The processes of a script may end one after the other: some are done while others are asked to leave."""
        return True

    def raised(self, state: Attempt) -> list[WorkerExit]:
        """An error of a script counts only if no other rank of its group was lost, except a crash."""
        raised = super().raised(state)
        if is_of_a_loss(state):
            return [e for e in raised if e.error is not None and e.error.mistake == CRASH]
        return raised

    def failure(self, exits: tuple[WorkerExit, ...]) -> UserFailure:
        """The first error is the cause, as torchrun has it: the other ranks raise a little later. The ranks of a task
        report such errors as failed collectives."""
        first = min(exits, key=lambda e: e.at)
        return most_frequent(tuple(e for e in exits if _is_same_error(e, first)))

    def end_by_error(
        self, state: Attempt, exits: tuple[WorkerExit, ...], *, is_repeated: bool
    ) -> tuple[str, UserFailure]:
        failure = self.failure(exits)
        if is_repeated:
            failure = _final(failure, f"{failure.sentence}, on {ranks_text(failure.ranks)}")
        first = min(e.at for e in exits)
        done = [e.rank for e in state.group.exits.values() if e.kind is ExitKind.FINISHED and e.at < first]
        if not done:
            return failure.sentence, failure
        sentence = sentence_with_ranks(failure).removesuffix(".")
        return f"{sentence}. Before, {ranks_text(done)} had ended with status 0.", failure

    def count_end(self, state: Attempt) -> tuple[Crash | None, UserFailure | None]:
        last, step = state.health.program_end, state.progress.furthest_step
        if last is not None and (step > last.step or any(e.has_output for e in state.group.exits.values())):
            last = None
        ended = _end_of_program(state)
        if ended is None:
            return last, None
        times = last.times + 1 if last is not None and last.words == ended.type else 1
        crash = Crash(words=ended.type, step=step, generation=state.group.generation, times=times)
        return crash, _final(ended, ended.message) if times >= TIMES else None

    def find_source(
        self, state: Attempt, memory: SnapshotSource | None, checkpoint_url: str | None
    ) -> tuple[StateSource | None, int]:
        """A script finds its files itself."""
        return None, state.progress.step

    def describe_save(self, state: Attempt) -> str:
        return "its script was asked to end, and goes on from its own checkpoint."

    def describe_finish(self, state: Attempt) -> str:
        script = state.target.spec.script
        assert script is not None
        after = f" after {count_text(state.progress.step, 'step')}" if state.has_reported else ""
        return f"{script.words} has ended with status 0 on every rank{after}"


_TASK, _SCRIPT = TaskRules(), ScriptRules()


def find_rules(state: Attempt) -> TaskRules:
    return _SCRIPT if state.target.is_script else _TASK


def most_frequent(exits: tuple[WorkerExit, ...]) -> UserFailure:
    """Return the error that most ranks have raised, with those ranks."""
    groups: dict[tuple[str, str], list[WorkerExit]] = {}
    for worker_exit in exits:
        if worker_exit.error is not None:
            groups.setdefault((worker_exit.error.type, worker_exit.error.message), []).append(worker_exit)
    largest = max(groups.values(), key=len)
    error = largest[0].error
    assert error is not None
    failure = error.as_failure(ranks=tuple(sorted(e.rank for e in largest)), step=largest[0].step)
    return failure.model_copy(update={"traceback": _PACKAGE.sub("", error.traceback)})


def is_of_a_loss(state: Attempt) -> bool:
    """True if another rank was lost, so an error that a script raises follows from that. A crash does not."""
    return any(e.kind is ExitKind.SCRIPT_DIED for e in state.group.exits.values()) or _has_lost_worker(state)


def _has_lost_worker(state: Attempt) -> bool:
    """True if a worker of the group is gone, and not because of an error."""
    if state.incident is None or state.incident.cause is IncidentCause.STUCK:
        return False  # a worker that is stuck was ended because of the error
    workers = (state.pool.worker(index) for index in state.group.workers if index not in state.group.exits)
    return any(worker is None or worker.left_out is not None for worker in workers)


def _has_to_leave(state: Attempt) -> bool:
    """True if a worker of the group was told to leave, or its node is avoided: its processes get signals."""
    avoided = {node.node_id for node in state.target.avoided if not node.keeps_workers}
    workers = [worker for index in state.group.workers if (worker := state.pool.worker(index)) is not None]
    return any(worker.leave is not None or worker.node_id in avoided for worker in workers)


def _is_same_error(this: WorkerExit, other: WorkerExit) -> bool:
    errors = [(e.error.type, e.error.message) for e in (this, other) if e.error is not None]
    return len(errors) == 2 and errors[0] == errors[1]


def _end_of_program(state: Attempt) -> UserFailure | None:
    """Return the end of the program itself that has ended the group, with its place as the type. None if a worker was
    lost or has to leave, which explains every other end. A signal whose sender is not known counts as the program's:
    its worker lives on."""
    script, incident = state.target.spec.script, state.incident
    if script is None or incident is None or _has_lost_worker(state) or _has_to_leave(state):
        return None
    ends = sorted(state.group.exits.values(), key=lambda e: (e.kind is not ExitKind.SCRIPT_DIED, e.at))
    kinds = (ExitKind.SCRIPT_DIED, ExitKind.COLLECTIVE_FAILED)
    rank, error = next(((e.rank, e.error) for e in ends if e.kind in kinds), (0, None))
    ranks = [e.rank for e in ends if e.kind is ExitKind.FINISHED and ends[0].kind is not ExitKind.SCRIPT_DIED]
    if ranks:
        place = "status 0"
        waited = f" (rank {rank} was at {error.line})" if error is not None and error.line else ""
        sentence = f"{ranks_text(ranks)} of {script.words} ended with status 0 while others still trained{waited}"
    elif error is not None:
        ranks, place = [rank], f"{error.type} {error.line}"
        sentence = f"{error.sentence.rstrip('.')}, on rank {rank}"
    elif incident.cause is IncidentCause.HUNG:
        ranks, place, sentence = list(incident.ranks), "hung", incident.message
    else:
        return None
    return UserFailure(
        type=place,
        message=sentence,
        traceback=error.traceback if error is not None else "",
        phase=Phase.SCRIPT,
        ranks=tuple(sorted(ranks)),
        step=state.progress.step,
        line=error.line if error is not None else "",
    )


def _final(failure: UserFailure, sentence: str) -> UserFailure:
    """Return the failure as one after which no other attempt follows."""
    message = f"{sentence}, {count_text(TIMES, 'time')} in a row without a new step or a file with new content."
    return failure.model_copy(update={"mistake": REPEATED, "message": message})
