"""CheckpointCoordinator: the supervisor's access to checkpoint storage. Called by the executor.

Blocking calls run in threads; their results become events of the attempt machine. It decides nothing. A call that the
storage does not answer within timeouts.commit_s is given up, and until it returns each commit fails at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from shoal_service.core.attempt.events import (
    CheckpointCommitted,
    CheckpointFound,
    CommitFailed,
    Event,
    StorageAway,
    StorageUnusable,
)
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.events.training import CheckpointRetentionFailed
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.protocols import Catalog, Deleter, Found, World
from shoal_service.supervisor.reporting.reporter import Reporter
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.checkpoint.errors import StorageUnusable as UnusableError
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart

T = TypeVar("T")
_log = logging.getLogger(__name__)
_REMOVE_S = 5.0


class StorageHangs(OSError):
    """The storage neither answered nor failed within the time."""


class CheckpointCoordinator:
    """Commits one checkpoint at a time, in order, and deletes old ones after each."""

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
        self._hanging: asyncio.Future[Any] | None = None
        """The call that was given up. It is done once the storage has answered it."""

    async def find(self, excluding: tuple[str, ...]) -> None:
        try:
            found = await asyncio.to_thread(self._find, excluding)
        except OSError as error:
            self._post(StorageAway(f"{type(error).__name__}: {error}"))
        except UnusableError as error:
            self._post(StorageUnusable(str(error)) if error.is_final else StorageAway(error.reason))
        except Exception as error:
            self._post(StorageUnusable(f"{type(error).__name__}: {error}"))
        else:
            damaged = tuple((str(name), str(error)) for name, error in found.damaged)
            self._post(CheckpointFound(str(found.name) if found.name else None, damaged))

    async def commit(self, name: str, parts: tuple[SavedPart, ...], state: Attempt) -> None:
        """Writes the marker of a complete set of parts of one generation."""
        first = parts[0]
        async with self._one_at_a_time:
            try:
                await asyncio.to_thread(self._require_current)
                job_id, attempt = state.config.job_id, state.config.attempt
                marker = await self._answered(
                    partial(self._catalog.commit, parts, job_id=job_id, attempt=attempt, now=self._clock.time()), state
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
        """Deletes the checkpoints that were never committed. Called after the end of the attempt and of its workers.

        If head or storage do not answer soon, they are left to the retention of a later attempt.
        """
        try:
            await self._clock.wait_for(self._remove_torn(state), _REMOVE_S)
        except Exception as error:
            _log.warning("checkpoint.torn_not_removed", extra={"error": f"{type(error).__name__}: {error}"})

    def show_damaged(self, name: str, message: str) -> None:
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

    async def _answered(self, call: Callable[[], T], state: Attempt) -> T:
        """Waits for a blocking call, and returns its result. Its thread cannot be ended, so none is started beside one
        that hangs."""
        limit_s = state.config.timeouts.commit_s
        if self._hanging is not None and not self._hanging.done():
            raise StorageHangs(f"the storage has still not answered a call that was given up after {limit_s:g} s")
        calling = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            return await self._clock.wait_for(asyncio.shield(calling), limit_s)
        except TimeoutError:
            if calling.done():
                raise
            self._hanging = calling
            calling.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, whatever it is
            raise StorageHangs(f"the storage did not answer within {limit_s:g} s (timeouts.commit_s)") from None

    def _find(self, excluding: tuple[str, ...]) -> Found:
        if not self._is_checked:
            self._catalog.check_writable()
            self._catalog.begin(self._config.attempt)
            self._is_checked = True
        return self._catalog.search(excluding=_names(excluding))

    async def _remove_torn(self, state: Attempt) -> None:
        committing = _names(state.checkpoints.committing)
        await asyncio.to_thread(self._catalog.remove_torn, in_flight=committing, by=self._deleter(state))

    def _deleter(self, state: Attempt) -> Deleter:
        return Deleter(state.config.attempt, state.life, self._require_current)

    async def _retain(self, state: Attempt) -> None:
        try:
            deleted = await self._answered(
                partial(
                    self._catalog.retain,
                    self._config.spec.checkpoint.keep,
                    damaged=_names(state.checkpoints.damaged),
                    in_flight=_names(state.checkpoints.committing),
                    pinned=_names(state.target.pinned),
                    best=state.history.standing.kept_steps if state.history.standing is not None else (),
                    by=self._deleter(state),
                ),
                state,
            )
        except Exception as error:  # training goes on without; the next commit tries again
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
