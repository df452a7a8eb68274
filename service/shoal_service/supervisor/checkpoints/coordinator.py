"""CheckpointCoordinator: the supervisor's access to checkpoint storage. Called by the executor.

Blocking calls run in threads; their results become events of the attempt machine. It decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shoal_service.core.attempt.events import (
    CheckpointCommitted,
    CheckpointFound,
    CommitFailed,
    Event,
    StorageUnusable,
)
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.events.checkpoints import CheckpointRetentionFailed
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.protocols import Catalog, World
from shoal_service.supervisor.reporting.reporter import Reporter
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart

_log = logging.getLogger(__name__)
_REMOVE_S = 5.0


class CheckpointCoordinator:
    """One commit at a time, in order; old checkpoints are deleted after each."""

    def __init__(
        self, config: SupervisorConfig, world: World, reporter: Reporter, post: Callable[[Event], None]
    ) -> None:
        self._catalog = world.catalog
        self._require_current = world.journal.require_current
        self._clock = world.clock
        self._config = config
        self._reporter = reporter
        self._post = post
        self._is_checked = False
        self._one_at_a_time = asyncio.Lock()

    async def find(self, excluding: tuple[str, ...]) -> None:
        try:
            name = await asyncio.to_thread(self._find, excluding)
        except Exception as error:
            self._post(StorageUnusable(str(error)))
            return
        self._post(CheckpointFound(str(name) if name else None))

    async def commit(self, name: str, parts: tuple[SavedPart, ...], state: Attempt) -> None:
        """Write the marker of a complete set of parts of one generation."""
        first = parts[0]
        async with self._one_at_a_time:
            try:
                await asyncio.to_thread(self._require_current)
                job_id, attempt = state.config.job_id, state.config.attempt
                marker = await asyncio.to_thread(
                    self._catalog.commit, parts, job_id=job_id, attempt=attempt, now=self._clock.time()
                )
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                self._reporter.checkpoint(_view(self._catalog, name, parts, state, CheckpointState.FAILED, message))
                self._post(CommitFailed(name, first.generation, message))
                return
            view = _view(self._catalog, name, parts, state, CheckpointState.COMMITTED, "")
            self._reporter.checkpoint(view.model_copy(update={"committed_at": marker.committed_at}))
            self._post(CheckpointCommitted(name, first.generation, first.step))
            await self._retain(state)

    async def remove_torn(self, state: Attempt) -> None:
        """After the attempt's end and the end of its workers: deletes the checkpoints that were never committed.

        If head or storage do not answer soon, they are left to the retention of a later attempt.
        """
        try:
            await self._clock.wait_for(self._remove_torn(state), _REMOVE_S)
        except Exception as error:
            _log.warning("checkpoint.torn_not_removed", extra={"error": f"{type(error).__name__}: {error}"})

    async def show_damaged(self, name: str, message: str) -> None:
        parsed = CheckpointName.parse(name)
        assert parsed is not None
        self._reporter.checkpoint(
            CheckpointView(
                step=parsed.step,
                url=self._catalog.url(parsed),
                state=CheckpointState.DAMAGED,
                attempt=parsed.attempt,
                generation=parsed.generation,
                message=message,
            )
        )

    def _find(self, excluding: tuple[str, ...]) -> CheckpointName | None:
        if not self._is_checked:
            self._catalog.check_writable()
            self._is_checked = True
        return self._catalog.newest(excluding=_names(excluding))

    async def _remove_torn(self, state: Attempt) -> None:
        await asyncio.to_thread(self._require_current)
        await asyncio.to_thread(self._catalog.remove_torn, in_flight=_names(state.checkpoints.committing))

    async def _retain(self, state: Attempt) -> None:
        try:
            deleted = await asyncio.to_thread(
                self._catalog.retain,
                self._config.spec.checkpoint.keep,
                damaged=_names(state.checkpoints.damaged),
                in_flight=_names(state.checkpoints.committing),
            )
        except Exception as error:
            self._reporter.event(CheckpointRetentionFailed(message=f"{type(error).__name__}: {error}"))
            return
        for name in deleted:
            self._reporter.checkpoint(
                CheckpointView(
                    step=name.step,
                    url=self._catalog.url(name),
                    state=CheckpointState.DELETED,
                    attempt=name.attempt,
                    generation=name.generation,
                )
            )


def _names(names: tuple[str, ...]) -> list[CheckpointName]:
    return [parsed for parsed in (CheckpointName.parse(name) for name in names) if parsed is not None]


def _view(
    catalog: Catalog, name: str, parts: tuple[SavedPart, ...], state: Attempt, view_state: CheckpointState, message: str
) -> CheckpointView:
    parsed = CheckpointName.parse(name)
    assert parsed is not None
    return CheckpointView(
        step=parsed.step,
        url=catalog.url(parsed),
        state=view_state,
        bytes=sum(file.bytes for part in parts for file in part.files),
        seconds=max(part.stall_s + part.write_s for part in parts),
        stall_s=max(part.stall_s for part in parts),
        attempt=state.config.attempt,
        generation=parsed.generation,
        world_size=len(parts),
        message=message,
    )
