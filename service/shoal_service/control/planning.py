"""Questions to the planner from outside, for `POST /v1/plans` and `shoal plan`, and processes that bound their cost.

    python -P -m shoal_service.control.planning

A search for a layout of tens of thousands of workers may take minutes of CPU time, and must hold neither other requests
nor the stop of the server. So the server asks such a process, which reads one question per line and writes one reply
per line. It is kept for the next question, and killed if it exceeds the budget or if the one who asked has gone. It
ends with the server, since its input ends. The command line calls `answer` itself.
The number of workers comes from the request, not from the spec's `elasticity`. It submits and runs nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from shoal_service.cluster.ray_environment import inherited
from shoal_service.control.hardware_profiles import measured_profile
from shoal_service.core.layout_plan import UNKNOWN_NEED, HostNeed
from shoal_service.core.quantities import count_text
from shoal_service.planner import HardwareProfile, Ranking, plan, rank
from shoal_service.planner.correction import Observation, apply, correct
from shoal_service.planner.gpus import DEFAULT_GPU
from shoal_service.planner.report import predict_planned_step
from shoal_workers.contract.base import Frozen, exactly_one_of
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, parse_spec
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.spec import JobSpec

MAX_RANKS = 65_536
BUDGET_S = 20.0
_AT_ONCE = 2
_AXES_BY_NAME = {"pp": "pp", "dp": "dp_replicate", "fsdp": "dp_shard", "cp": "cp", "tp": "tp", "ep": "ep"}
_COMMAND = (sys.executable, "-P", "-m", "shoal_service.control.planning")
_NICENESS = 10
_LONGEST_LINE = 64 << 20


class PlanRequest(Frozen):
    """Exactly one of `workers` and `gpus`."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("workers", "gpus"))

    spec: dict[str, Any]
    """A job spec."""
    workers: int | None = Field(None, ge=1, le=MAX_RANKS)
    """Number of workers as the spec describes them."""
    gpus: int | None = Field(None, ge=1, le=MAX_RANKS)
    """Number of workers with one GPU each, whatever the spec's `worker.gpus` is."""
    gpu: str | None = Field(None, max_length=64)
    """Name of a GPU's hardware profile."""
    top: int = Field(10, ge=1, le=100)
    """Number of layouts in the answer."""
    racks: tuple[tuple[Annotated[int, Field(ge=1)], ...], ...] = Field((), max_length=MAX_RANKS)
    """By rack: the number of workers on each of its nodes. Default: one rack of nodes of the profile's size."""
    compare: str = Field("", max_length=200)
    """Degrees of a layout to predict beside the best one: `tp8 pp2`. fsdp takes the other ranks if it is not named."""


class MeasuredSteps(Frozen):
    """The steps of a job that has trained on this hardware."""

    spec: JobSpec
    workers: int
    step_s: float
    """Median."""


class Choice(Frozen):
    """The layout that a job would run with."""

    layout: Layout
    name: str
    num_idle: int
    """Workers that the layout does not use."""
    reason: str
    host: HostNeed = UNKNOWN_NEED
    """Host memory of a worker."""


class PlanAnswer(Frozen):
    """The planner's answer."""

    name: str
    """Name of the spec."""
    tokens_per_step: int
    """0: the planner cannot count the task's tokens."""
    num_micro_batches: int
    micro_size: int
    choice: Choice
    ranking: Ranking


def answer(
    request: PlanRequest, profiles: Mapping[str, HardwareProfile], measured: Sequence[MeasuredSteps] = ()
) -> PlanAnswer:
    """Answers a question. Pure.

    `measured`: steps of jobs on the cluster's hardware, which correct predictions for the same hardware.

    Raises:
        SpecError: the spec or the request is not valid, or the spec has a script, for which nothing is planned.
    """
    if (request.workers is None) == (request.gpus is None):
        raise _problem("", "Give exactly one of workers and gpus.")
    if request.gpu is not None and request.gpus is None:
        raise _problem("gpu", f"gpu {request.gpu!r} needs gpus, the number of them.")
    world_size = request.workers or request.gpus or 1
    room = sum(size for rack in request.racks for size in rack)
    if request.racks and room < world_size:
        raise _problem(
            "racks", f"racks have room for {count_text(room, 'worker')}, of {world_size} that the plan is for."
        )
    spec = _spec(request.spec, world_size)
    if spec.program is not None:
        kind = "script" if spec.script is not None else "loop"
        message = (
            f"{spec.program.words} is a {kind}, which splits its own work: every worker runs it, and there is no "
            "layout to choose. Set elasticity.min_workers and max_workers."
        )
        raise _problem(kind, message)
    if request.gpus is not None:
        spec = spec.model_copy(update={"worker": spec.worker.model_copy(update={"gpus": 1})})
    profile = _profile(spec.worker.gpus > 0, request.gpu, profiles)
    degrees = _degrees(request.compare) if request.compare else None
    ranking = rank(spec, world_size, profile, request.top, request.racks, degrees)
    if degrees is not None and ranking.predictions and ranking.compared is None:
        raise _problem(
            "compare", f"compare {request.compare!r} is no legal layout of {count_text(world_size, 'rank')}."
        )
    if ranking.predictions:
        observations = _observations(spec, profile, profiles, measured)
        ranking = apply(correct(observations, profile.kind), ranking)
    planned = plan(spec, world_size, profile, request.racks)
    layout = planned.layout
    sequence = ranking.predictions[0].tokens_per_s * ranking.predictions[0].step_s if ranking.predictions else 0
    return PlanAnswer(
        name=spec.name,
        tokens_per_step=round(sequence),
        num_micro_batches=spec.batch.num_micro_batches,
        micro_size=spec.batch.micro_size,
        choice=Choice(
            layout=layout,
            name=layout.describe(),
            num_idle=world_size - layout.world_size,
            reason=planned.reason,
            host=planned.host,
        ),
        ranking=ranking,
    )


def _observations(
    spec: JobSpec,
    profile: HardwareProfile,
    profiles: Mapping[str, HardwareProfile],
    measured: Sequence[MeasuredSteps],
) -> list[Observation]:
    """The measured jobs whose layouts are planned for the hardware of `profile`, each beside its prediction."""
    observations = []
    for job in measured:
        has_gpu = job.spec.worker.gpus > 0
        if has_gpu != (spec.worker.gpus > 0) or _profile(has_gpu, None, profiles).name != profile.name:
            continue
        predicted_s = predict_planned_step(job.spec, job.workers, profile)
        if predicted_s is not None:
            is_same = (job.spec.task, job.spec.model, job.spec.batch) == (spec.task, spec.model, spec.batch)
            observations.append(Observation(predicted_s, job.step_s, is_same))
    return observations


def _degrees(text: str) -> dict[str, int]:
    """`tp8 pp2`, also as a layout is described: `pp2 x tp8`."""
    degrees: dict[str, int] = {}
    for part in re.split(r"[\s,]+", text.strip()):
        match = re.fullmatch(r"([a-z_]+)([1-9][0-9]*)", part)
        if part == "x":
            continue
        axis = _AXES_BY_NAME.get(match[1]) if match else None
        if match is None or axis is None:
            known = ", ".join(_AXES_BY_NAME)
            raise _problem("compare", f"compare {text!r}: {part!r} is no degree. Write tp8 pp2; the axes are {known}.")
        degrees[axis] = int(match[2])
    return degrees


def _spec(document: dict[str, Any], world_size: int) -> JobSpec:
    """The spec for that number of workers. If no layout uses all of them, some are idle, and the answer shows it."""
    try:
        return parse_spec({**document, "elasticity": {"min_workers": world_size, "max_workers": world_size}})
    except SpecError as error:
        if {problem.path for problem in error.problems} != {"elasticity.max_workers"}:
            raise
    return parse_spec({**document, "elasticity": {}})


def _profile(has_gpu: bool, name: str | None, profiles: Mapping[str, HardwareProfile]) -> HardwareProfile:
    desired = name or (DEFAULT_GPU if has_gpu else "cpu")
    if name is None:  # a measured profile of this machine is preferred
        measured = measured_profile(profiles.values(), has_gpu=has_gpu)
        desired = measured.name if measured is not None else desired
    if desired not in profiles:
        raise _problem("gpu", f"gpu {desired!r} has no profile; there are: {', '.join(sorted(profiles))}.")
    return profiles[desired]


def _problem(path: str, message: str) -> SpecError:
    return SpecError((SpecProblem(path=path, message=message),))


class _Question(Frozen):
    request: PlanRequest
    profiles: dict[str, HardwareProfile]
    measured: tuple[MeasuredSteps, ...] = ()


class _Reply(Frozen):
    """An answer, or an error."""

    answer: PlanAnswer | None = None
    problems: tuple[SpecProblem, ...] = ()


class PlanningProcesses:
    """The processes that answer questions to the planner. Used on one event loop.

    Two questions are answered at a time; others wait, within their budget.
    """

    def __init__(self, profiles: Mapping[str, HardwareProfile], *, budget_s: float = BUDGET_S) -> None:
        self._profiles = dict(profiles)
        self._budget_s = budget_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._idle: asyncio.subprocess.Process | None = None

    async def answer(self, request: PlanRequest, measured: Sequence[MeasuredSteps] = ()) -> PlanAnswer:
        """Answers a question. Raises SpecError: the spec or the request is not valid, or its answer takes too long."""
        try:
            async with asyncio.timeout(self._budget_s), self._slots:
                reply = await self._ask(_Question(request=request, profiles=self._profiles, measured=tuple(measured)))
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
        """Keeps one process for the next question, and ends a second one."""
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
        return _Reply(answer=answer(question.request, question.profiles, question.measured))
    except SpecError as error:
        return _Reply(problems=error.problems)


if __name__ == "__main__":
    _serve()
