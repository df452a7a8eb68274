"""The state with which an attempt begins. Pure; called by the supervisor when there is no journal entry."""

from __future__ import annotations

from shoal_service.core import goodput
from shoal_service.core.attempt.incidents import incident_of
from shoal_service.core.attempt.state.attempt import Attempt, AttemptConfig, CheckpointIndex, Code, History, Target
from shoal_service.core.attempt.state.stages import Opening
from shoal_service.supervisor.config import SupervisorConfig


def new_attempt(config: SupervisorConfig, now: float) -> Attempt:
    incident = incident_of(config.lost, now) if config.lost is not None else None
    origin = config.spec.continue_from
    return Attempt(
        config=AttemptConfig(
            job_id=config.job_id,
            attempt=config.attempt,
            checkpoint_root=config.checkpoint_root,
            timeouts=config.timeouts.with_spec(config.spec.timeouts),
            profile=config.profile,
        ),
        target=Target(spec=config.spec, granted=config.granted, avoided=config.avoid, pinned=config.pinned),
        current=Opening(since=now),
        code=Code(current=config.spec.code.archive or ""),
        checkpoints=CheckpointIndex(origin=origin.checkpoint if origin is not None else None),
        history=History(standing=config.standing, num_incidents=0 if incident is None else incident.id),
        incident=incident,
        ledger=goodput.resume(config.goodput, at=now),
    )
