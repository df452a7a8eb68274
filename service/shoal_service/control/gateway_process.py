"""GatewayProcess: the gateway of this server's own cluster, as a child that is started again when it ends or hangs.

Made and run by `shoal serve`. The child dials this server as any gateway does. Its token is in a file of the state
directory that no other user can read, so that a server which was killed finds its own one again; the child gets it
through its standard input.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from shoal_service.cluster.isolation import Account
from shoal_service.clusters.wire import COMMAND, GatewayConfig
from shoal_service.core.gateways import HangLimits, WatchedGateway, hangs, replaced, watched
from shoal_service.store import StoreUnavailable
from shoal_workers.contract.backoff import backoff_s

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_LIVES_S = 30.0
"""A gateway that has lived for this long is started again without a longer pause than the first one."""
_END_S = 8.0
_LOOK_S = 1.0
"""Pause between two looks at whether the gateway has reported."""
_LIMITS = HangLimits()
_log = logging.getLogger(__name__)


class GatewayProcess:
    """The gateway of the service's own cluster, as a child process. Used on one event loop."""

    def __init__(
        self,
        configure: Callable[[], GatewayConfig],
        environment: Mapping[str, str],
        newest_report: Callable[[], tuple[str, int]],
        *,
        account: Account | None = None,
        command: Sequence[str] = COMMAND,
        limits: HangLimits = _LIMITS,
        look_s: float = _LOOK_S,
    ) -> None:
        """
        Args:
            configure: called before each start, on a thread.
            environment: all that the child gets.
            newest_report: life and number of the newest report of the cluster that is stored. On a thread.
            account: the user of the child; without it, the user of this process.
            command: of the child.
            limits: after which silence it is killed.
            look_s: between two calls of `newest_report`.
        """
        self._configure = configure
        self._environment = dict(environment) if account is None else account.adapt_environment(environment)
        self._account = account
        self._newest_report = newest_report
        self._command = tuple(command)
        self._limits = limits
        self._look_s = look_s
        self._watched = WatchedGateway()
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if no child runs."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    async def run(self) -> None:
        """Starts the child, and another one each time that it has ended, until it is cancelled."""
        failures = 0
        while True:
            began_mono = time.monotonic()
            try:
                child = await asyncio.to_thread(self._start)
                status = await self._watch(child)
                _log.warning("gateway.ended", extra={"status": status, "pid": child.pid})
            except Exception:
                _log.exception("gateway.start_failed")
            failures = 1 if time.monotonic() - began_mono > _LIVES_S else failures + 1
            await asyncio.sleep(backoff_s(failures, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S))

    async def _watch(self, child: subprocess.Popen[bytes]) -> int:
        """Waits until the child has ended, kills one that hangs, and returns its exit status."""
        ended = asyncio.create_task(asyncio.to_thread(child.wait))
        looked_mono = time.monotonic()
        self._watched = replace(self._watched, report=None, silent_s=0.0, has_reported=False)
        while not (await asyncio.wait([ended], timeout=self._look_s))[0]:
            try:
                report = await asyncio.to_thread(self._newest_report)
            except Exception as error:  # no report could be stored, or it could not be seen: this time does not count
                if not isinstance(error, StoreUnavailable):
                    _log.exception("gateway.not_watched")
                looked_mono = time.monotonic()
                continue
            now_mono = time.monotonic()
            after_s = min(now_mono - looked_mono, 2 * self._look_s)  # this server may have been suspended itself
            looked_mono = now_mono
            self._watched = watched(self._watched, report, after_s)
            if reason := hangs(self._watched, self._limits):
                _log.warning("gateway.hangs", extra={"pid": child.pid, "reason": reason})
                self._watched = replaced(self._watched)
                child.kill()
                break
        status = await ended
        assert child.stdin is not None
        with suppress(OSError):  # what it has not read
            child.stdin.close()
        return status

    def stop(self) -> None:
        """Ends the child: it says farewell to the server, which must still answer. Blocks for some seconds at most."""
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        with suppress(OSError):
            child.stdin.close()
        try:
            child.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        config = self._configure()
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=self._environment,
            process_group=0,  # a terminal sends its Ctrl-C to the server only, which may still need this process
            **(self._account.popen if self._account is not None else {}),
        )
        self._child = child
        assert child.stdin is not None
        child.stdin.write(config.model_dump_json().encode() + b"\n")
        child.stdin.flush()
        return child
