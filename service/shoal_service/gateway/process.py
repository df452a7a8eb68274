"""The process of a gateway: `python -P -m shoal_service.gateway.process`.

It reads its configuration, one line of JSON, from its standard input: the token of the service is neither in its
arguments nor in its environment. Started by `shoal serve`, whose end is the end of that input, and by `shoal join`,
which becomes this process. The environment has the token of the Ray cluster, as Ray reads it.

Exit status: 0 after an orderly stop, 1 if the service refuses the gateway or Ray's client hangs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from shoal_service.clusters.wire import GatewayConfig
from shoal_service.gateway.gateway import Gateway, Link, RayAccess, RayHangs
from shoal_service.home import Home, Rejected, make_context
from shoal_service.process_memory import hide_process
from shoal_workers.logs import set_up_logs

_DISCONNECT_S = 3.0
_STOP_S = 6.0
_NO_EVENT_FILE = "RAY_event_log_reporter_enabled"
"""Ray aborts if it cannot write the file, and the directory is open to the user of the Ray node alone."""


def run(make_ray: Callable[[Home], RayAccess]) -> None:
    """Runs the gateway until the process ends, and does not return. `make_ray` is given the address at which
    supervisors reach the service."""
    config = GatewayConfig.model_validate_json(sys.stdin.buffer.readline())
    set_up_logs(config.logs)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    hide_process()
    asyncio.run(_run(make_ray(config.home), config))


async def _run(ray: RayAccess, config: GatewayConfig) -> NoReturn:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        stop.set()
        threading.Timer(_STOP_S, os._exit, (0,)).start()

    def handle_signals() -> None:
        """Called again after each connection, because Ray replaces the handler of SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if config.ends_with_input:
                signal.signal(number, signal.SIG_IGN)  # a server that stops may still need it to save its jobs
            else:
                loop.add_signal_handler(number, end)

    def await_end_of_input() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        loop.call_soon_threadsafe(end)

    handle_signals()
    if config.ends_with_input:
        threading.Thread(target=await_end_of_input, daemon=True, name="input").start()
    verify = make_context(config.ca, is_pinned=config.is_same_machine) if config.ca else True
    link = Link(config.url, config.token, config.cluster, verify)
    gateway = Gateway(
        ray,
        link,
        address=config.ray_address,
        say=_say,
        connected=handle_signals,
        replaces=config.replaces,
        labels=config.labels,
    )
    try:
        await gateway.run(stop)
        status = 0
    except Rejected as error:
        _say(f"gateway: the service at {config.url} refuses this gateway: {error}")
        status = 1
    except RayHangs as error:
        _say(f"gateway: {error}")
        status = 1
    with suppress(Exception):  # whatever Ray says: the process ends in any case
        await link.close()
        await asyncio.wait_for(asyncio.to_thread(ray.disconnect), _DISCONNECT_S)
    os._exit(status)  # a thread may wait in Ray without limit, and `asyncio.run` would wait for it


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    os.environ[_NO_EVENT_FILE] = "0"
    from shoal_service.gateway.ray_cluster import RayCluster

    run(lambda home: RayCluster(address=home))
