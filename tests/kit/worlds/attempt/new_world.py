"""Opens an attempt in a simulated world; the fixture `new_world` is this function."""

from __future__ import annotations

from typing import Any

from kit.worlds.attempt.parts import (
    ROOT,
    TIMEOUTS,
    TOTAL_STEPS,
)
from kit.worlds.attempt.world import World
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.incidents import open_after_loss
from shoal_service.core.attempt.state.attempt import Attempt, AttemptConfig, CheckpointIndex, History, Target
from shoal_service.core.attempt.state.parts import Opening, Starting
from shoal_service.core.endings import LostAttempt
from shoal_workers.contract.fault_tolerance import ElasticitySpec
from shoal_workers.contract.spec import JobSpec


def make_world(
    workers: int = 3,
    *,
    min_workers: int = 1,
    standby: int = 0,
    wait_s: float = 30.0,
    memory: bool = False,
    nodes: int | None = None,
    lost: LostAttempt | None = None,
    expected: str | None = None,
    **spec: Any,
) -> World:
    is_script = "script" in spec
    elasticity = ElasticitySpec(min_workers=min_workers, max_workers=8, standby=standby, wait_s=wait_s)
    task: dict[str, Any] = {"stop": {"steps": TOTAL_STEPS}, "batch": {"global_size": 8, "micro_size": 1}}
    if "task" not in spec:
        task["precision"] = "bf16"  # so the state is sharded: plain replicas would need no parts of others
    document = {**({} if is_script else task), **spec}
    document.setdefault("health", {"hang_floor_s": 3600.0})  # tests of other things may let time pass
    if not is_script:
        document["snapshot"] = {"enabled": memory}
    job_spec = JobSpec.model_validate(document)
    origin = job_spec.continue_from
    world = World(
        Attempt(
            config=AttemptConfig(job_id="j1", attempt=1, checkpoint_root=ROOT, timeouts=TIMEOUTS),
            target=Target(spec=job_spec.model_copy(update={"elasticity": elasticity}), granted=workers),
            current=Starting(since=1000.0) if is_script else Opening(since=1000.0),
            checkpoints=CheckpointIndex(expected=expected, origin=origin.checkpoint if origin is not None else None),
            incident=open_after_loss(lost, 1000.0) if lost is not None else None,
            history=History(num_incidents=0 if lost is None else 1),
        ),
        num_nodes=nodes,
    )
    world.perform(machine.open_attempt(world.state))
    return world
