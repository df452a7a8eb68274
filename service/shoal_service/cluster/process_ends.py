"""How the processes of an actor have ended that Ray has replaced, from the head's tables of actors and of workers.

The head's service of workers is not a public interface (Ray's version is pinned). Called by `supervisor/actor.py` in a
supervisor that died again and again, which wants to say why. Blocks for some seconds at most.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.common_pb2 import NODE_OUT_OF_MEMORY
from ray.core.generated.gcs_service_pb2 import GetWorkerInfoRequest
from ray.core.generated.gcs_service_pb2_grpc import WorkerInfoGcsServiceStub

import ray
from shoal_service.cluster import gcs
from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.core.supervisor_starts import ProcessEnd

_log = logging.getLogger(__name__)
_TIMEOUT_S = 2.0


def ends_of(actor_id: str, last: int) -> tuple[ProcessEnd, ...]:
    """Of the last processes before the present one, oldest first; fewer if the head does not know more."""
    try:
        worker_ids = gcs.replaced_processes(actor_id)[-last:]
        with init_grpc_channel(ray.get_runtime_context().gcs_address) as channel:
            stub = WorkerInfoGcsServiceStub(channel)
            return tuple(_end(stub, worker_id) for worker_id in worker_ids)
    except (GcsUnavailable, grpc.RpcError) as error:
        _log.warning("process_ends.unknown", extra={"error": str(error)})
        return ()


def _end(stub: Any, worker_id: bytes) -> ProcessEnd:
    answer = stub.GetWorkerInfo(GetWorkerInfoRequest(worker_id=worker_id), timeout=_TIMEOUT_S)
    worker = answer.worker_table_data
    return ProcessEnd(worker.exit_type == NODE_OUT_OF_MEMORY, worker.exit_detail)
