"""How the processes of an actor have ended that Ray has replaced, from the head's tables of actors and of workers.

Called by `supervisor/actor.py` in a supervisor that died again and again, which wants to say why. Blocks for some
seconds at most.
"""

from __future__ import annotations

import logging

import grpc

import ray
from shoal_service.cluster import gcs
from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_workers.ray_internals import ends_of_processes

_log = logging.getLogger(__name__)
_TIMEOUT_S = 2.0


def ends_of(actor_id: str, last: int) -> tuple[ProcessEnd, ...]:
    """How the last processes before the present one have ended, oldest first; fewer if the head does not know more."""
    try:
        worker_ids = gcs.replaced_processes(actor_id)[-last:]
        found = ends_of_processes(ray.get_runtime_context().gcs_address, worker_ids, _TIMEOUT_S)
        return tuple(ProcessEnd(lacked_memory, words) for lacked_memory, words in found)
    except (GcsUnavailable, grpc.RpcError) as error:
        _log.warning("process_ends.unknown", extra={"error": str(error)})
        return ()
