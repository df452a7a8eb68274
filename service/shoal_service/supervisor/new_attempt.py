"""The state with which an attempt begins. Pure; called by the supervisor when there is no journal entry."""

from __future__ import annotations

from shoal_service.core import goodput
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Opening
from shoal_service.core.attempt.state.target import AttemptConfig, Target
from shoal_service.supervisor.config import SupervisorConfig


def new_attempt(config: SupervisorConfig, now: float) -> Attempt:
    return Attempt(
        config=AttemptConfig(
            job_id=config.job_id,
            attempt=config.attempt,
            checkpoint_root=config.checkpoint_root,
            timeouts=config.timeouts,
            profile=config.profile,
        ),
        target=Target(spec=config.spec, granted=config.granted, avoided=config.avoid),
        current=Opening(since=now),
        ledger=goodput.resume(config.goodput, at=now),
    )
