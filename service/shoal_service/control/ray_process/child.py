"""The Ray process: is the driver of the Ray cluster, and answers the control plane's calls.

    python -P -m shoal_service.control.ray_process.child DESCRIPTOR LOG_SETTINGS

Started by `RemoteCluster`, with one end of a socket pair and an environment without the service's settings. It ends
with the other end of that pair, however the control plane ends. It decides nothing and stores nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress

from shoal_service.control.ray_process.remote_cluster import HOME
from shoal_service.control.ray_process.responder import Responder, ServedCluster, ignore_signals
from shoal_service.home import Home
from shoal_workers.contract.log_settings import LogSettings
from shoal_workers.logs import set_up_logs


def serve(cluster: ServedCluster) -> None:
    """Does not return: the process ends with its connection."""
    set_up_logs(LogSettings.model_validate_json(sys.argv[2]))
    ignore_signals()
    asyncio.run(_serve(cluster, int(sys.argv[1])))


async def _serve(cluster: ServedCluster, descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    with suppress(ConnectionError):  # the control plane has ended
        await Responder(cluster, writer).serve(reader)
    os._exit(0)  # a thread may wait in Ray without limit


if __name__ == "__main__":
    from shoal_service.control.ray_process.ray_cluster import RayCluster

    serve(RayCluster(address=Home.model_validate_json(os.environ.pop(HOME))))
