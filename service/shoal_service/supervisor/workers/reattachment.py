"""What a restarted supervisor does with a worker that it has found by name. Called by the executor, on its loop."""

from __future__ import annotations

from shoal_service.core.attempt.state.worker import Worker
from shoal_service.supervisor.workers.worker_client import WorkerClient
from shoal_workers.contract.base import WIRE_VERSION


def adopt(client: WorkerClient, worker: Worker, generation: int, *, is_to_run: bool) -> None:
    """`generation`: the newest in the journal; `is_to_run`: the worker's `run` call is repeated."""
    client.adopt(generation)
    client.start_polling()
    if worker.info is not None:
        client.probe(worker.info)
    if worker.in_run and not is_to_run:
        client.rejoin(generation)
    elif worker.left_out is not None and worker.left_out.generation is not None:
        client.rejoin(worker.left_out.generation)
    elif not worker.warm:
        client.prepare()


def version_of(worker: Worker, entry_version: int) -> int:
    """Of the wire. A worker that was not warm has the version of the journal's entry."""
    return worker.info.version if worker.info is not None else entry_version


def speaks_this_version(worker: Worker, entry_version: int) -> bool:
    return version_of(worker, entry_version) == WIRE_VERSION
