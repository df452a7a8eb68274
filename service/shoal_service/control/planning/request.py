"""A request to the planner from outside, and its answer: for `POST /v1/plans` and `shoal plan`, which answer the same.

The number of workers comes from the request, not from the spec's `elasticity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from shoal_service.control.hardware_profiles import measured_profile
from shoal_service.core.attempt.plan_layout import UNKNOWN_NEED, HostNeed
from shoal_service.core.quantities import count_text
from shoal_service.planner import HardwareProfile, Ranking, plan, rank
from shoal_service.planner.gpus import DEFAULT_GPU
from shoal_workers.contract.base import Frozen, exactly_one_of
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, parse_spec
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.spec import JobSpec

MAX_RANKS = 65_536


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


def answer(request: PlanRequest, profiles: Mapping[str, HardwareProfile]) -> PlanAnswer:
    """Pure.

    Raises:
        SpecError: the spec or the request is not valid.
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
    if request.gpus is not None:
        spec = spec.model_copy(update={"worker": spec.worker.model_copy(update={"gpus": 1})})
    profile = _profile(spec.worker.gpus > 0, request.gpu, profiles)
    ranking = rank(spec, world_size, profile, request.top, request.racks)
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
