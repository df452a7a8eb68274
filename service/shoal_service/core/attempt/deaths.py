"""What follows from how a process ended: a crash at the same place again and again, or lack of memory.

    SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV    a fault of native code that the task runs, or of the machine
    other signals but SIGKILL and SIGTERM       of the task: an alarm, a limit of time. Who sends those two is not known
    an exit status                              `os._exit` or C's `exit` in the task or a library: Shoal's workers leave
                                                `run` and are killed, and never end themselves
    three groups in a row, the same place       the task's: each time other processes have ended there
    killed for lack of memory                   the same; and from then on no new worker of the attempt touches memory
                                                before it is needed; the death does not count against its node

A worker that waits for its first group touches the memory that the planner expects it to use, so that its first step is
fast. Where memory is short that may be what kills it, or its neighbour, again and again.
"""

from __future__ import annotations

import re
from dataclasses import replace

from shoal_service.core.attempt import incidents, suspicion
from shoal_service.core.attempt.state.attempt import Attempt, Crash, Death
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.attempt.verdict import CRASH
from shoal_service.core.events.workers import WarmMemoryOff
from shoal_service.core.quantities import count_text, ranks_text
from shoal_workers.contract.job import EndReason, IncidentCause, UserFailure

TIMES = 3
_KEPT_DEATHS = 64
_CRASH = re.compile(
    r"\b(?:was )?(killed by (?:signal (?!9\b|15\b)\d+\b.*|the kernel: out of memory)|exited with -?\d+)$"
)
_EXIT, _OUT_OF_MEMORY = "exited with", "killed by the kernel"
PROCESS_EXIT, NO_MEMORY = "process_exit", "no_memory"
"""Values of `UserFailure.mistake`, as CRASH."""


def note_death(turn: Turn, worker: Worker, cause: IncidentCause) -> None:
    """Note the death of a worker with its group and step, because its exit status becomes known later."""
    rank = turn.group.rank_of(worker.index)
    if cause is not IncidentCause.WORKER_DIED or rank is None:
        return
    death = Death(
        worker_id=worker.worker_id,
        rank=rank,
        generation=turn.group.generation,
        step=turn.progress.furthest_step,
    )
    turn.health = replace(turn.health, deaths=(*turn.health.deaths, death)[-_KEPT_DEATHS:])


def explained(turn: Turn, worker_id: str, message: str) -> None:
    """Act on the exit status of a worker, which may become known some time after the death."""
    memory_killed(turn, worker_id, message)
    incidents.explain_death(turn, worker_id, message)
    _crash_explained(turn, worker_id, message)


def _crash_explained(turn: Turn, worker_id: str, message: str) -> None:
    """Count a crash whose exit status is known. Ends the attempt if it is the third in a row at one place."""
    found = _CRASH.search(message)
    death = next((one for one in turn.health.deaths if one.worker_id == worker_id), None)
    if found is None or death is None:
        return
    turn.health = replace(turn.health, deaths=tuple(one for one in turn.health.deaths if one is not death))
    crash = _after(turn.health.crash, death, found[1])
    turn.health = replace(turn.health, crash=crash)
    if crash.times >= TIMES:
        mistake, advice = CRASH, "look at the native code that is called there"
        if crash.words.startswith(_EXIT):
            mistake, advice = PROCESS_EXIT, "look for os._exit in the task and in the libraries that it calls"
        elif crash.words.startswith(_OUT_OF_MEMORY):
            mistake, advice = NO_MEMORY, "lower batch.micro_size, or give the workers more memory"
        sentence = f"{words_of(crash)}; run `shoal check`, and {advice}."
        failure = UserFailure(
            type=mistake,
            message=sentence,
            traceback="",
            phase="",
            ranks=(death.rank,),
            step=crash.step,
            mistake=mistake,
        )
        turn.end(EndReason.USER_ERROR, sentence, failure)


def words_of(crash: Crash) -> str:
    """The crash in words: `killed by signal 11 (SIGSEGV) in validation after step 20, 3 times in a row at the same
    place`."""
    times = "once" if crash.times == 1 else f"{count_text(crash.times, 'time')} in a row at the same place"
    what, comma, line = crash.words.partition(", at ")
    return f"{what} after step {crash.step}{comma}{line}, {times}"


def last_words(state: Attempt) -> str:
    """Words about how the group ended: the crash that it has just had, if its exit status is known; otherwise what the
    incident says."""
    crash = state.health.crash
    if crash is not None and state.group.generation - crash.generation <= 1:
        return words_of(crash)
    if state.incident is None:
        return "unknown"
    ranks = f"{ranks_text(state.incident.ranks)}: " if state.incident.ranks else ""
    return ranks + state.incident.message


def _after(last: Crash | None, death: Death, words: str) -> Crash:
    """The crash record after this death. Two ranks of one group that crash count once."""
    # + 1: a step may be completed whose report was lost with the worker.
    if last is None or last.words != words or death.step > last.step + 1:
        return Crash(words=words, step=death.step, generation=death.generation)
    times = last.times + (death.generation > last.generation)
    newest = max(last.generation, death.generation)
    return Crash(words=words, step=last.step, generation=newest, times=times)


_WORDS = ("out of memory", "out-of-memory", "running low on memory", "oom-kill", "outofmemory")
"""Words by which the kernel and Ray's memory monitor report a lack of memory, in lower case."""


def is_out_of_memory(message: str) -> bool:
    return any(words in message.lower() for words in _WORDS)


def memory_killed(turn: Turn, worker_id: str, message: str) -> None:
    """Note that a worker was killed for lack of memory, if the message says so. The exit status may become known some
    time after the death. The event is emitted once per attempt."""
    if not is_out_of_memory(message):
        return
    suspicion.forget_loss(turn, worker_id)
    if turn.health.is_memory_scarce:
        return
    turn.health = replace(turn.health, is_memory_scarce=True)
    turn.emit(WarmMemoryOff(worker_id=worker_id, message=message))
