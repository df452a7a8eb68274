"""rank(...): the table of `shoal plan` and POST /v1/plans. refusal(...): why a job fits no machine, asked at submit."""

from __future__ import annotations

from shoal_service.core.hardware_profile import DeviceKind, HardwareProfile
from shoal_service.planner.capacity import too_large
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.planning import profile_for
from shoal_service.planner.prediction import Ranking
from shoal_service.planner.ranking import LayoutTable, Task, predict_layouts
from shoal_service.planner.shape import shape_of
from shoal_workers.contract.spec import JobSpec, ParallelismSpec


def rank(spec: JobSpec, world_size: int, profile: HardwareProfile | None = None, top: int = 10) -> Ranking:
    """The `top` best combinations of degrees for exactly `world_size` ranks, each with the best other choices.

    There are none for a user task, and none if the world has no legal layout; `note` says so.
    """
    profile = profile_for(spec, profile)
    shape = shape_of(spec)
    empty = Ranking(world_size=world_size, profile=profile.name, usable_bytes=int(profile.usable_bytes))
    if shape is None:
        return empty.model_copy(
            update={
                "note": f"task {spec.task!r} is a user task: the planner does not know the sizes of its model, so it "
                "predicts nothing."
            }
        )
    fixed = spec.parallelism if isinstance(spec.parallelism, ParallelismSpec) else None
    task = Task(spec, shape, profile, fixed)
    found = predict_layouts(task, [world_size], offload=fixed is not None and fixed.offload)
    model = {"num_params": shape.params, "num_active_params": shape.active_params}
    if not len(found):
        return empty.model_copy(update=model | {"note": _no_layout(task, world_size)})
    return empty.model_copy(
        update=model
        | {
            "num_layouts": len(found),
            "num_fitting": found.num_fitting,
            "predictions": found.best(top),
            "note": "" if found.num_fitting else too_large(task, world_size, found),
        }
    )


def refusal(spec: JobSpec) -> str:
    """Why no layout of any world that the job may have fits into memory; "": one does, or the sizes are unknown.

    Called at submit, when the nodes are unknown. Workers with a GPU are assumed to have the largest built-in one, and
    workers without one are limited by `worker.memory_gib` only.
    """
    shape = shape_of(spec)
    if shape is None or (not spec.worker.gpus and not spec.worker.memory_gib):
        return ""
    largest = max(PROFILES.values(), key=lambda one: (one.kind is DeviceKind.GPU, one.memory_bytes))
    profile = profile_for(spec, largest if spec.worker.gpus else None)
    task, world_size = Task(spec, shape, profile), spec.elasticity.max_workers
    found = _largest_table(task, world_size)
    if found.num_fitting or (spec.worker.gpus and predict_layouts(task, [world_size], offload=True).num_fitting):
        return ""
    return too_large(task, world_size, found)


def _largest_table(task: Task, world_size: int) -> LayoutTable:
    """The table of the largest world that has a layout."""
    return next(found for world in range(world_size, 0, -1) if len(found := predict_layouts(task, [world])))


def _no_layout(task: Task, world_size: int) -> str:
    near = [world for size in range(1, 2048) for world in (world_size - size, world_size + size) if world > 0]
    legal = next((world for world in near if len(predict_layouts(task, [world]))), None)
    hint = f" The nearest world that has one: {legal}." if legal else ""
    fixed = " with the degrees that parallelism fixes" if task.fixed is not None else ""
    return (
        f"{world_size} ranks have no legal layout{fixed}: the number is not a product of at most "
        f"{task.spec.batch.num_micro_batches} data ranks (micro-batches a step) and of degrees that the model "
        f"allows.{hint}"
    )
