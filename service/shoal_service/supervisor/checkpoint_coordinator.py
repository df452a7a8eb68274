"""CheckpointCoordinator: the supervisor's access to checkpoint storage.

Blocking calls run in threads; their results become events of the attempt machine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from shoal_service.core.attempt.events import (
    CheckpointCommitted,
    CheckpointFound,
    CommitFailed,
    Event,
    StorageUnusable,
)
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.supervisor.checkpoint_catalog import CheckpointCatalog
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.reporter import Reporter
from shoal_service.views import CheckpointView
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import SavedPart

_log = logging.getLogger(__name__)
_REMOVE_S = 5.0


class CheckpointCoordinator:
    """One commit at a time, in order; retention follows each."""

    def __init__(
        self,
        catalog: CheckpointCatalog,
        config: SupervisorConfig,
        reporter: Reporter,
        post: Callable[[Event], None],
        require_current: Callable[[], None],
    ) -> None:
        """`require_current` blocks until it is certain that no other supervisor has taken this one's place."""
        self._catalog = catalog
        self._config = config
        self._reporter = reporter
        self._post = post
        self._require_current = require_current
        self._checked = False
        self._one_at_a_time = asyncio.Lock()

    async def find(self, excluding: tuple[str, ...]) -> None:
        try:
            name = await asyncio.to_thread(self._find, excluding)
        except Exception as error:
            self._post(StorageUnusable(str(error)))
            return
        self._post(CheckpointFound(str(name) if name else None))

    async def commit(self, name: str, parts: tuple[SavedPart, ...], state: Attempt) -> None:
        """Write the marker; only a complete set of parts of the machine's own generation gets here."""
        first = parts[0]
        async with self._one_at_a_time:
            try:
                await asyncio.to_thread(self._require_current)
                job_id, attempt = state.config.job_id, state.config.attempt
                marker = await asyncio.to_thread(
                    self._catalog.commit, parts, job_id=job_id, attempt=attempt, now=time.time()
                )
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                self._reporter.checkpoint(_view(self._catalog, name, parts, state, "failed", message))
                self._post(CommitFailed(name, first.generation, first.step, message))
                return
            view = _view(self._catalog, name, parts, state, "committed", "")
            self._reporter.checkpoint(view.model_copy(update={"committed_at": marker.committed_at}))
            self._post(CheckpointCommitted(name, first.generation, first.step))
            await self._retain(state)

    async def remove_torn(self, state: Attempt) -> None:
        """The attempt is over and its workers are gone: what they had only begun to save never becomes a checkpoint.
        It is left to the retention of a later attempt if head or storage do not answer soon."""
        try:
            async with asyncio.timeout(_REMOVE_S):
                await asyncio.to_thread(self._require_current)
                await asyncio.to_thread(self._catalog.remove_torn, in_flight=_names(state.checkpoints.committing))
        except Exception as error:
            _log.warning("unfinished checkpoints are left behind", extra={"error": f"{type(error).__name__}: {error}"})

    async def show_damaged(self, name: str, message: str) -> None:
        parsed = CheckpointName.parse(name)
        assert parsed is not None
        self._reporter.checkpoint(
            CheckpointView(
                step=parsed.step,
                url=self._catalog.url(parsed),
                state="damaged",
                attempt=parsed.attempt,
                generation=parsed.generation,
                message=message,
            )
        )

    def _find(self, excluding: tuple[str, ...]) -> CheckpointName | None:
        if not self._checked:
            self._catalog.check_writable()
            self._checked = True
        return self._catalog.newest(excluding=_names(excluding))

    async def _retain(self, state: Attempt) -> None:
        try:
            deleted = await asyncio.to_thread(
                self._catalog.retain,
                self._config.spec.checkpoint.keep,
                damaged=_names(state.checkpoints.damaged),
                in_flight=_names(state.checkpoints.committing),
            )
        except Exception as error:
            self._reporter.event("checkpoint.retention_failed", {"message": f"{type(error).__name__}: {error}"})
            return
        for name in deleted:
            self._reporter.checkpoint(
                CheckpointView(
                    step=name.step,
                    url=self._catalog.url(name),
                    state="deleted",
                    attempt=name.attempt,
                    generation=name.generation,
                )
            )


def _names(names: tuple[str, ...]) -> list[CheckpointName]:
    return [parsed for parsed in (CheckpointName.parse(name) for name in names) if parsed is not None]


def _view(
    catalog: CheckpointCatalog, name: str, parts: tuple[SavedPart, ...], state: Attempt, view_state: str, message: str
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
