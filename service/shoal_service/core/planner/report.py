"""rank(...): the table of `shoal plan` and POST /v1/plans. Pure."""

from __future__ import annotations

from shoal_service.core.planner.capacity import too_large
from shoal_service.core.planner.planning import profile_for
from shoal_service.core.planner.prediction import Ranking
from shoal_service.core.planner.preferences import Preference
from shoal_service.core.planner.profile import HardwareProfile
from shoal_service.core.planner.ranking import Task, field
from shoal_service.core.planner.shape import shape_of
from shoal_workers.contract.spec import JobSpec, ParallelismSpec


class NothingToPredict(ValueError):
    """The sizes of the model are unknown, or the world has no legal layout."""

    code = "nothing_to_predict"


def rank(spec: JobSpec, world_size: int, profile: HardwareProfile | None = None, top: int = 10) -> Ranking:
    """The `top` best products of degrees of exactly `world_size` ranks, each with its best other choices.

    Raises:
        NothingToPredict: a user's own task; or no legal layout, with the nearest world that has one.
    """
    profile = profile_for(spec, profile)
    shape = shape_of(spec)
    if shape is None:
        raise NothingToPredict(
            f"task {spec.task!r} is a task of your own: the planner does not know the sizes of its model. It runs "
            f"fully sharded ({Preference.UNKNOWN_MODEL}), or with the degrees that parallelism fixes."
        )
    fixed = spec.parallelism if isinstance(spec.parallelism, ParallelismSpec) else None
    task = Task(spec, shape, profile, fixed)
    found = field(task, [world_size], offload=fixed is not None and fixed.offload)
    if not len(found):
        raise NothingToPredict(_no_layout(task, world_size))
    return Ranking(
        world_size=world_size,
        profile=profile.name,
        usable_bytes=int(profile.usable_bytes),
        num_layouts=len(found),
        num_fitting=found.num_fitting,
        predictions=found.best(top),
        too_large="" if found.num_fitting else too_large(task, world_size, found),
    )


def _no_layout(task: Task, world_size: int) -> str:
    near = [world for size in range(1, 2048) for world in (world_size - size, world_size + size) if world > 0]
    legal = next((world for world in near if len(field(task, [world]))), None)
    hint = f" The nearest world that has one: {legal}." if legal else ""
    asked = " with the degrees that parallelism fixes" if task.fixed is not None else ""
    return (
        f"{world_size} ranks have no legal layout{asked}: they are no product of at most "
        f"{task.spec.batch.num_micro_batches} data ranks (micro-batches a step) and of degrees that the model "
        f"allows.{hint}"
    )
