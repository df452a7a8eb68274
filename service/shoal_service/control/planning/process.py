"""Answers plan requests in processes of their own, within a time budget: a search for a layout of tens of thousands of
workers may take minutes of CPU time, and must hold neither other requests nor the stop of the server.

    python -P -m shoal_service.control.planning.process

Such a process reads one question per line and writes one reply per line. It is kept for the next question, and killed
if it exceeds the budget or if the one who asked has gone. It ends with the server, since its input ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping

from shoal_service.cluster.ray_environment import inherited
from shoal_service.control.planning.request import PlanAnswer, PlanRequest, answer
from shoal_service.core.hardware_profile import HardwareProfile
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem

BUDGET_S = 20.0
_AT_ONCE = 2
_COMMAND = (sys.executable, "-P", "-m", "shoal_service.control.planning.process")
_NICENESS = 10
_LONGEST_LINE = 64 << 20


class _Question(Frozen):
    request: PlanRequest
    profiles: dict[str, HardwareProfile]


class _Reply(Frozen):
    """One of the two."""

    answer: PlanAnswer | None = None
    problems: tuple[SpecProblem, ...] = ()


class PlanningProcesses:
    """Used on one event loop. Two questions are answered at a time; others wait, within their budget."""

    def __init__(self, profiles: Mapping[str, HardwareProfile], *, budget_s: float = BUDGET_S) -> None:
        self._profiles = dict(profiles)
        self._budget_s = budget_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._idle: asyncio.subprocess.Process | None = None

    async def answer(self, request: PlanRequest) -> PlanAnswer:
        """Raises SpecError: the spec or the request is not valid, or its answer takes too long."""
        try:
            async with asyncio.timeout(self._budget_s), self._slots:
                reply = await self._ask(_Question(request=request, profiles=self._profiles))
        except TimeoutError:
            raise SpecError((_too_slow(request, self._budget_s),)) from None
        if reply.answer is None:
            raise SpecError(reply.problems)
        return reply.answer

    async def close(self) -> None:
        process, self._idle = self._idle, None
        if process is not None:
            await _end(process)

    async def _ask(self, question: _Question) -> _Reply:
        process, self._idle = self._idle, None
        if process is None or process.returncode is not None:
            process = await _start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(question.model_dump_json().encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                raise RuntimeError(f"the planning process has ended with {await process.wait()}")
        except BaseException:  # also if the request is cancelled: the process still works on it
            await _end(process)
            raise
        await self._keep(process)
        return _Reply.model_validate_json(line)

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        """One is kept; a second one ends."""
        if self._idle is None:
            self._idle = process
        else:
            await _end(process)


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *_COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=inherited(os.environ),
        limit=_LONGEST_LINE,
        process_group=0,  # a terminal sends its Ctrl-C to the server only
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _too_slow(request: PlanRequest, budget_s: float) -> SpecProblem:
    setting, number = ("workers", request.workers) if request.gpus is None else ("gpus", request.gpus)
    message = (
        f"{setting} {number}: the planner has no answer within {budget_s:g} s. Ask for fewer, give a step more "
        "micro-batches (batch.global_size / batch.micro_size) so that more ranks have work, or fix the degrees in "
        "parallelism. `shoal plan` on your own machine has no limit."
    )
    return SpecProblem(path=setting, message=message)


def _serve() -> None:
    os.nice(_NICENESS)
    for line in sys.stdin.buffer:
        signal.alarm(int(2 * BUDGET_S))  # if the server is killed meanwhile
        reply = _reply(_Question.model_validate_json(line))
        signal.alarm(0)
        sys.stdout.buffer.write(reply.model_dump_json().encode() + b"\n")
        sys.stdout.buffer.flush()


def _reply(question: _Question) -> _Reply:
    try:
        return _Reply(answer=answer(question.request, question.profiles))
    except SpecError as error:
        return _Reply(problems=error.problems)


if __name__ == "__main__":
    _serve()
