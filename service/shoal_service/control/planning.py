"""Questions to the planner from outside, for `POST /v1/plans` and `shoal plan`, and processes that bound their cost.

    python -P -m shoal_service.control.planning

A search for a layout of tens of thousands of workers may take minutes of CPU time, and must hold neither other requests
nor the stop of the server. So the server asks such a process, which reads one question per line and writes one reply
per line. It is kept for the next question, and killed if it exceeds the budget or if the one who asked has gone. It
ends with the server, since its input ends. The command line calls `answer` itself.
The number of workers comes from the request, not from the spec's `elasticity`. It submits and runs nothing.

The hardware profiles of this machine are measured by `shoal profile`, and kept under the state directory as JSON files
`profiles/<name>.json`.

`shoal plan` and the server read them together with the built-in ones; a stored profile replaces the built-in one of the
same name, and the planner prefers a measured one. What `python -m shoal_workers.profile` cannot measure on one machine
(links to others) is taken from the most similar built-in profile.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from shoal_service.cluster.ray_environment import inherit_environment
from shoal_service.core.hardware_profile import NARROW_HEAD_SHARE, DeviceKind, Link
from shoal_service.core.layout_plan import UNKNOWN_NEED, HostNeed
from shoal_service.core.quantities import count_text
from shoal_service.planner import HardwareProfile, Ranking, plan, rank
from shoal_service.planner.correction import Observation, apply_correction, estimate_correction
from shoal_service.planner.gpus import CPU, DEFAULT_GPU, PROFILES
from shoal_service.planner.planning import profile_for
from shoal_service.planner.report import predict_planned_step
from shoal_workers.contract import Frozen, JobSpec, Layout, Precision, exactly_one_of
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, parse_spec

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
    """Degrees of a layout to predict beside the best one: `tp8 pp2`. fsdp takes the other ranks if it is not named. The
    engine may refuse the layout if other programs have it; the answer says why."""


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
        raise SpecError.at("", "Give exactly one of workers and gpus.")
    if request.gpu is not None and request.gpus is None:
        raise SpecError.at("gpu", f"gpu {request.gpu!r} needs gpus, the number of them.")
    world_size = request.workers or request.gpus or 1
    room = sum(size for rack in request.racks for size in rack)
    if request.racks and room < world_size:
        raise SpecError.at(
            "racks", f"racks have room for {count_text(room, 'worker')}, of {world_size} that the plan is for."
        )
    spec = _parse_for_size(request.spec, world_size)
    if spec.program is not None:
        kind = "script" if spec.script is not None else "loop"
        message = (
            f"{spec.program.words} is a {kind}, which splits its own work: every worker runs it, and there is no "
            "layout to choose. Set elasticity.min_workers and max_workers."
        )
        raise SpecError.at(kind, message)
    if request.gpus is not None:
        spec = spec.model_copy(update={"worker": spec.worker.model_copy(update={"gpus": 1})})
    profile = _choose_profile(spec.worker.gpus > 0, request.gpu, profiles)
    degrees = _parse_degrees(request.compare) if request.compare else None
    ranking = rank(spec, world_size, profile, request.top, request.racks, degrees)
    if degrees is not None and ranking.predictions and ranking.compared is None:
        raise SpecError.at(
            "compare", f"compare {request.compare!r} is no legal layout of {count_text(world_size, 'rank')}."
        )
    if ranking.predictions:
        observations = _compare_measured(spec, profile, profiles, measured)
        ranking = apply_correction(estimate_correction(observations, profile.kind), ranking)
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


def _compare_measured(
    spec: JobSpec,
    profile: HardwareProfile,
    profiles: Mapping[str, HardwareProfile],
    measured: Sequence[MeasuredSteps],
) -> list[Observation]:
    """The measured jobs whose layouts are planned for the hardware of `profile`, each beside its prediction."""
    observations = []
    for job in measured:
        has_gpu = job.spec.worker.gpus > 0
        if has_gpu != (spec.worker.gpus > 0) or _choose_profile(has_gpu, None, profiles).name != profile.name:
            continue
        predicted_s = predict_planned_step(job.spec, job.workers, profile)
        if predicted_s is not None:
            is_same = (job.spec.task, job.spec.model, job.spec.batch) == (spec.task, spec.model, spec.batch)
            observations.append(Observation(predicted_s, job.step_s, is_same))
    return observations


def _parse_degrees(text: str) -> dict[str, int]:
    """`tp8 pp2`, also as a layout is described: `pp2 x tp8`."""
    degrees: dict[str, int] = {}
    for part in re.split(r"[\s,]+", text.strip()):
        match = re.fullmatch(r"([a-z_]+)([1-9][0-9]*)", part)
        if part == "x":
            continue
        axis = _AXES_BY_NAME.get(match[1]) if match else None
        if match is None or axis is None:
            known = ", ".join(_AXES_BY_NAME)
            raise SpecError.at(
                "compare", f"compare {text!r}: {part!r} is no degree. Write tp8 pp2; the axes are {known}."
            )
        degrees[axis] = int(match[2])
    return degrees


def _parse_for_size(document: dict[str, Any], world_size: int) -> JobSpec:
    """The spec for that number of workers. If no layout uses all of them, some are idle, and the answer shows it."""
    try:
        return parse_spec({**document, "elasticity": {"min_workers": world_size, "max_workers": world_size}})
    except SpecError as error:
        if {problem.path for problem in error.problems} != {"elasticity.max_workers"}:
            raise
    return parse_spec({**document, "elasticity": {}})


def _choose_profile(has_gpu: bool, name: str | None, profiles: Mapping[str, HardwareProfile]) -> HardwareProfile:
    desired = name or (DEFAULT_GPU if has_gpu else "cpu")
    if name is None:  # a measured profile of this machine is preferred
        measured = measured_profile(profiles.values(), has_gpu=has_gpu)
        desired = measured.name if measured is not None else desired
    if desired not in profiles:
        raise SpecError.at("gpu", f"gpu {desired!r} has no profile; there are: {', '.join(sorted(profiles))}.")
    return profiles[desired]


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
            raise SpecError((_make_slow_problem(request, self._budget_s),)) from None
        if reply.answer is None:
            raise SpecError(reply.problems)
        return reply.answer

    async def close(self) -> None:
        process, self._idle = self._idle, None
        if process is not None:
            await _end_process(process)

    async def _ask(self, question: _Question) -> _Reply:
        process, self._idle = self._idle, None
        if process is None or process.returncode is not None:
            process = await _start_process()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(question.model_dump_json().encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                raise RuntimeError(f"the planning process has ended with {await process.wait()}")
        except BaseException:  # also if the request is cancelled: the process still works on it
            await _end_process(process)
            raise
        await self._keep(process)
        return _Reply.model_validate_json(line)

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        """Keeps one process for the next question, and ends a second one."""
        if self._idle is None:
            self._idle = process
        else:
            await _end_process(process)


async def _start_process() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *_COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=inherit_environment(os.environ),
        limit=_LONGEST_LINE,
        process_group=0,  # a terminal sends its Ctrl-C to the server only
    )


async def _end_process(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _make_slow_problem(request: PlanRequest, budget_s: float) -> SpecProblem:
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
        reply = _make_reply(_Question.model_validate_json(line))
        signal.alarm(0)
        sys.stdout.buffer.write(reply.model_dump_json().encode() + b"\n")
        sys.stdout.buffer.flush()


def _make_reply(question: _Question) -> _Reply:
    try:
        return _Reply(answer=answer(question.request, question.profiles, question.measured))
    except SpecError as error:
        return _Reply(problems=error.problems)


_FOLDER = "profiles"
_TIMEOUT_S = 600
_ATTENTION_LENGTH = 4096
"""Tokens of the sequence that `shoal_workers.profile` measures on a GPU."""


class ProfileError(ValueError):
    """A stored profile cannot be read. The message names the file."""

    code = "invalid_profile"


def load_profiles(state_dir: Path) -> dict[str, HardwareProfile]:
    """All profiles by name; a stored one replaces the built-in one of its name. Raises ProfileError."""
    profiles = dict(PROFILES)
    for path in sorted((state_dir / _FOLDER).glob("*.json")):
        try:
            profile = HardwareProfile.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            first = str(error).splitlines()[0]
            raise ProfileError(
                f"{path} is not a hardware profile ({first}). Remove it, or run `shoal profile`."
            ) from None
        profiles[profile.name] = profile
    return profiles


def measured_profile(profiles: Iterable[HardwareProfile], *, has_gpu: bool) -> HardwareProfile | None:
    """Finds the first profile that was measured on a node of that kind."""
    return next(
        (profile for profile in profiles if profile.measured and (profile.kind is DeviceKind.GPU) == has_gpu), None
    )


def planning_profile(spec: JobSpec, profiles: Iterable[HardwareProfile]) -> HardwareProfile:
    """Chooses the profile with which the layouts of a job are planned."""
    return profile_for(spec, measured_profile(profiles, has_gpu=spec.worker.gpus > 0))


def save_profile(state_dir: Path, profile: HardwareProfile) -> Path:
    """Stores the profile in place of the stored one of the same name. Returns the file."""
    path = state_dir / _FOLDER / f"{profile.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(profile.model_dump_json(indent=2), encoding="utf-8")
    partial.replace(path)
    return path


class ProfilingError(RuntimeError):
    """The measurement failed; the message is the end of its output."""

    code = "profiling_failed"


def measure_profile(
    *, name: str | None, max_processes: int, seconds: float, report: Callable[[str], None]
) -> HardwareProfile:
    """Measures this machine. Takes about a minute. Raises ProfilingError."""
    report(f"measuring groups of up to {count_text(max_processes, 'process')}; keep the machine otherwise idle")
    command = [sys.executable, "-m", "shoal_workers.profile", "--processes", str(max_processes)]
    try:
        done = subprocess.run(
            [*command, "--seconds", str(seconds)], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ProfilingError(f"the measurement took more than {_TIMEOUT_S} s. Use fewer --processes.") from None
    if done.returncode:
        raise ProfilingError("\n".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}")
    return profile_of(json.loads(done.stdout.splitlines()[-1]), name)


def profile_of(measured: dict[str, Any], name: str | None = None) -> HardwareProfile:
    """Makes a profile of the measurements of `shoal_workers.profile`. Pure."""
    is_gpu = measured["device"] == "cuda"
    like = _find_most_like(measured["name"]) if is_gpu else CPU
    matmul = {Precision(precision): float(rate) for precision, rate in measured["matmul_flops"].items()}
    groups = {int(size): group for size, group in measured["groups"].items()}
    inside = like.inside
    if groups:
        # of the largest group with a processor for each rank: the planner itself accounts for crowded groups
        largest = max((size for size in groups if size <= int(measured["num_devices"])), default=min(groups))
        inside = Link(
            bandwidth=groups[largest]["bytes_per_s"],
            latency_s={size: group["latency_s"] for size, group in groups.items()},
        )
    # a CPU has one rank per core
    rank_bytes = int(measured["memory_bytes"]) // (1 if is_gpu else max(1, int(measured["num_devices"])))
    # the data sheet's peak if there is one: MFU is relative to it
    peak = dict(like.peak_flops) if is_gpu else matmul
    base = Precision.BF16 if is_gpu else Precision.FP32
    return like.model_copy(
        update={
            "name": name or (f"{like.name}-measured" if is_gpu else "cpu"),
            "peak_flops": peak,
            "matmul_efficiency": min(1.0, matmul[base] / peak[base]),
            "attention_efficiency": min(1.0, measured["attention_flops"] / peak[base]),
            "attention_rates": _scale_attention(like, measured["attention_flops"]) if is_gpu else {},
            "half_width": measured["half_width"],
            "memory_bytes": rank_bytes,
            "memory_bandwidth": measured["elementwise_bytes_per_s"],
            "host_bandwidth": measured["host_bytes_per_s"],
            "inside": inside,
            "between": like.between if is_gpu else inside,
            "ranks_per_node": max(1, int(measured["num_devices"])) if is_gpu else like.ranks_per_node,
            "processors_per_node": 0 if is_gpu else int(measured["num_devices"]),
            "measured": True,
        }
    )


def _scale_attention(like: HardwareProfile, measured_flops: float) -> dict[int, tuple[float, float]]:
    """The rates of the most similar GPU at all lengths, by what one length and heads of 64 have shown."""
    if _ATTENTION_LENGTH not in like.attention_rates:
        return {}
    share = measured_flops / (NARROW_HEAD_SHARE * like.attention_rates[_ATTENTION_LENGTH][0])
    rates = like.attention_rates.items()
    return {length: (share * forward, share * backward) for length, (forward, backward) in rates}


def _find_most_like(device_name: str) -> HardwareProfile:
    """Finds the built-in GPU whose name is a word of the device's name: "NVIDIA H200" -> h200."""
    name_parts = device_name.lower().replace("_", "-").replace("-", " ").split()
    fitting = [p for p in PROFILES.values() if p.kind is DeviceKind.GPU and p.name.split("-")[0] in name_parts]
    if len(fitting) > 1:  # one GPU in sizes: a100-40gb, a100-80gb
        fitting = [p for p in fitting if p.name.split("-")[-1] in name_parts] or fitting
    return fitting[0] if fitting else PROFILES[DEFAULT_GPU]


if __name__ == "__main__":
    _serve()
