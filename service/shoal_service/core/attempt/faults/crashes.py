"""Workers that crash or end themselves: by what only their own code causes, again and again at the same place.

    SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV    a fault of native code that the task runs, or of the machine
    an exit status                              `os._exit` or C's `exit` in the task or a library: Shoal's workers leave
                                                `run` and are killed, and never end themselves
    three groups in a row, the same place       the task's: each time other processes have ended there

The exit status of a process becomes known some time after its death. Called by `group/exits` with each death and by
`machine` with each exit status.
"""

from __future__ import annotations

import re
from dataclasses import replace

from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.health import Crash, Death
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.quantities import count_text
from shoal_workers.contract.job import EndReason, IncidentCause, UserFailure

TIMES = 3
_KEPT_DEATHS = 64
_CRASH = re.compile(r"\b(?:was )?(killed by signal (?:4|6|7|8|11)\b.*|exited with -?\d+)$")
_EXIT = "exited with"
CRASH, PROCESS_EXIT = "crash", "process_exit"
"""As `UserFailure.mistake`."""


def worker_died(turn: Turn, worker: Worker, cause: IncidentCause) -> None:
    """Note in which group: its exit status comes later."""
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


def death_explained(turn: Turn, worker_id: str, message: str) -> None:
    """The exit status is known. Ends the attempt if it is the third crash in a row at one place."""
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
        sentence = f"{words_of(crash)}; run `shoal check`, and {advice}"
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
    """`killed by signal 11 (SIGSEGV) in validation after step 20, 3 times in a row at the same place`."""
    times = "once" if crash.times == 1 else f"{count_text(crash.times, 'time')} in a row at the same place"
    what, comma, line = crash.words.partition(", at ")
    return f"{what} after step {crash.step}{comma}{line}, {times}"


def last_words(state: Attempt) -> str:
    """The crash that the group has just had, if its exit status is known; else what the incident says."""
    crash = state.health.crash
    if crash is not None and state.group.generation - crash.generation <= 1:
        return words_of(crash)
    return state.incident.message if state.incident else "unknown"


def _after(last: Crash | None, death: Death, words: str) -> Crash:
    """Two ranks of one group that crash count once. A step may be completed whose report was lost with the worker."""
    if last is None or last.words != words or death.step > last.step + 1:
        return Crash(words=words, step=death.step, generation=death.generation)
    times = last.times + (death.generation > last.generation)
    newest = max(last.generation, death.generation)
    return Crash(words=words, step=last.step, generation=newest, times=times)
