"""Every name of Ray that is not a part of its public interface, and that Shoal uses all the same.

For each: why Shoal needs it, what doing without would cost, and which public call comes closest. A new release of Ray
is tried by reading this file. Programs that cannot import it have a text of their own, and a test knows them:
`forkserver/launch.py` and `forkserver/idle.py` run before the package can be imported, and `cluster/embedded_node.py`
belongs to a server that never imports Ray and runs the command `ray` as the module `ray.scripts.scripts`. Ray's
settings, which are environment variables of the head, of nodes and of drivers, are in
`shoal_service/cluster/ray_environment.py`.

Ray is imported where it is called, since the fork server reads this file before it may import much, and a worker needs
none of the head's services. Called by what runs in Ray's processes, and by the cluster's room of the service.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WORKER_SCRIPT = "ray._private.workers.default_worker"
"""Module of the script that Ray runs as a worker's `__main__`.

Why: the fork server imports it, and with it all that the script needs, before it forks.
Without: each worker would import Ray again, about a second of CPU time.
Public: none.
"""
PROCESS_TITLE = b"ray::"
"""Beginning of the title that Ray gives to the process of a worker: `ray::` and the class of its actor.

Why: a pid may be reused, so a signal is sent only to a process that still is a worker.
Without: a job's own processes, or those of others, could be killed.
Public: `ray.util.state.list_workers`, which asks the head, and so fails while the head is away.
"""
IDLE_TITLE = b"ray::IDLE"
"""Title of a process in which Ray has created no actor yet.

Why: if the head dies while it starts an actor, a process stays for which no actor ever comes (`forkserver/idle.py`).
Without: such a process holds its CPU or GPU as long as its node lives.
Public: none; it is a bug of Ray (github.com/ray-project/ray issue 66199).
"""
RAYLET_SOCKET_OPTION = "--raylet-name="
"""Argument of a worker's process with the path of its raylet's socket.

Why: it is the one path that all processes of a node know and other nodes do not: the address of the node's fork server,
and the place of the exit statuses of its workers.
Without: a node with several raylets, as in tests, would mix up their workers.
Public: none; `get_runtime_context().get_node_id()` is known only after the process has registered.
"""
RAYLET_PID = "RAY_RAYLET_PID"
"""Environment variable of a worker's process with the pid of its raylet.

Why: an actor ends as soon as its raylet has ended (`actor_process`).
Without: Ray's own check notices it after a second, or never if no process reaps the raylet.
Public: none.
"""


TRAIN_MARKER = ".validate_storage_marker"
"""File that Ray Train writes into the directory of a run to see whether every node has the same one.

Why: the directory of a run of Shoal's is one that Ray Train can go on with.
Without: a name of our own would do, beside Ray's.
Public: none.
"""
TRAIN_SNAPSHOT = "checkpoint_manager_snapshot.json"
"""File of Ray Train V2 with the list of a run's checkpoints; `ray_train/run_directory.py` writes its keys.

Why: a script that goes on with a run of Ray Train finds its checkpoints, and `ray.train.Result.from_path` reads a run
of Shoal's.
Without: a list of our own; runs could not be handed on in either direction.
Public: `Result.from_path`, which reads it only.
"""


def raylet_socket(argv: Sequence[str] | None = None) -> str:
    """Path of the socket of the raylet that has started this process; empty: it is not a worker of Ray.

    Why, Without, Public: as of RAYLET_SOCKET_OPTION.
    """
    arguments = sys.argv if argv is None else argv
    option = RAYLET_SOCKET_OPTION
    return next((argument[len(option) :] for argument in arguments if argument.startswith(option)), "")


def raylet_pid() -> int | None:
    """Pid of that raylet.

    Why, Without, Public: as of RAYLET_PID.
    """
    pid = os.environ.get(RAYLET_PID, "")
    return int(pid) if pid.isdecimal() else None


def is_process_of(actor_class: str, pid: int) -> bool:
    """Return whether this pid is alive and the process of an actor of this class.

    Why, Without, Public: as of PROCESS_TITLE.
    """
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(PROCESS_TITLE + actor_class.encode())
    except OSError:
        return False


def actor_id(handle: Any) -> str:
    """Ray's id of an actor, from its handle.

    Why: the head is asked for the actor's death, node and starts by it.
    Without: by its name, which a successor of the same name has too, so an old death would look like a new one.
    Public: `get_runtime_context().get_actor_id()`, inside of the actor only.
    """
    return str(handle._actor_id.hex())


def package_uri(version: str) -> str:
    """URI of a package of Ray's runtime environments. `version`: SHA-256 of the archive.

    Why: the service stores the uploaded code of a job under it, and a supervisor does so again when Ray has lost it.
    Without: each driver would have to upload a directory of its own.
    Public: `runtime_env={"working_dir": directory}`, which packs a directory of the driver when it connects.
    """
    return f"gcs://_ray_pkg_{version[:32]}.zip"


def head() -> Any:
    """Return the client of the head (GCS) that this process is connected with; None if it is not connected.

    Why: its calls take a deadline. It is the way to the node table, announced drains, the tables of actors and the
    key-value store, in which the journal lies.
    Without: public calls wait for a head that is away, for minutes if necessary, and a supervisor with them; and the
    journal would need a store of its own.
    Public: `ray.nodes()`, `ray.util.state.list_actors()`; none for the key-value store.
    """
    from ray.experimental import internal_kv

    return internal_kv.internal_kv_get_gcs_client()


def draining_nodes(client: Any, head_address: str, timeout_s: float) -> dict[str, int]:
    """Return the nodes that Ray drains, by their ids in hexadecimal digits, with the time at which each goes away, in
    milliseconds since 1970; 0: unknown. Raises what calls of `client` raise, or grpc.RpcError.

    Why: workers leave such a node before it goes away.
    Without: every preemption that Ray knows of is a lost node.
    Public: none. The client has this call since Ray 2.60; earlier heads have it too.
    """
    if hasattr(client, "get_draining_nodes"):
        return dict(client.get_draining_nodes(timeout=timeout_s))
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.gcs_service_pb2 import GetDrainingNodesRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeResourceInfoGcsServiceStub

    with init_grpc_channel(head_address) as channel:
        answer = NodeResourceInfoGcsServiceStub(channel).GetDrainingNodes(GetDrainingNodesRequest(), timeout=timeout_s)
    return {node.node_id.hex(): node.draining_deadline_timestamp_ms for node in answer.draining_nodes}


def is_alive_node(info: Any) -> bool:
    """Return whether a row of the head's table of nodes is one of a node that is alive.

    Why, Without, Public: as of `head`, whose rows have these numbers.
    """
    from ray.core.generated import gcs_pb2

    return bool(info.state == gcs_pb2.GcsNodeInfo.ALIVE)


def is_alive_actor(info: Any) -> bool:
    """Return whether a row of the head's table of actors is one of an actor that is alive.

    Why, Without, Public: as of `head`, whose rows have these numbers.
    """
    from ray.core.generated import gcs_pb2

    return bool(info.state == gcs_pb2.ActorTableData.ALIVE)


def is_unstarted_actor(info: Any) -> bool:
    """Return whether no process was started yet for that actor.

    Why, Without, Public: as of `head`, whose rows have these numbers.
    """
    from ray.core.generated import gcs_pb2

    return bool(info.state == gcs_pb2.ActorTableData.DEPENDENCIES_UNREADY)


def ends_of_processes(head_address: str, worker_ids: Sequence[bytes], timeout_s: float) -> list[tuple[bool, str]]:
    """How processes of workers have ended: whether by Ray for lack of memory, and Ray's words. Raises grpc.RpcError.

    Why: a supervisor that died again and again says why.
    Without: the words "see the logs of the Ray workers on its node".
    Public: `ray.util.state.get_worker`, which needs the dashboard, and which a cluster may be without.
    """
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.common_pb2 import NODE_OUT_OF_MEMORY
    from ray.core.generated.gcs_service_pb2 import GetWorkerInfoRequest
    from ray.core.generated.gcs_service_pb2_grpc import WorkerInfoGcsServiceStub

    with init_grpc_channel(head_address) as channel:
        stub = WorkerInfoGcsServiceStub(channel)
        answers = [
            stub.GetWorkerInfo(GetWorkerInfoRequest(worker_id=worker_id), timeout=timeout_s) for worker_id in worker_ids
        ]
    workers = [answer.worker_table_data for answer in answers]
    return [(worker.exit_type == NODE_OUT_OF_MEMORY, worker.exit_detail) for worker in workers]


def request_idle_processes(
    raylet: str,
    environment: str,
    *,
    job_id: str,
    number: int,
    keep_s: float,
    working_dir: str,
    setup_s: int,
    timeout_s: float,
    failed: Callable[[BaseException], None],
) -> None:
    """Ask a raylet to start processes before there is an actor for them. Does not wait, and raises nothing.

    Why: an actor with the same runtime environment then need not wait for a process.
    Without: a new attempt starts some seconds later.
    Public: none.

    Args:
        raylet: its address, host:port.
        environment: the serialized runtime environment, exactly as Ray writes it for the actor.
        keep_s: how long the raylet keeps a process that it does not use.
        working_dir: the URI of the code package in `environment`; empty: there is none.
        setup_s: Ray's limit for the setup of a runtime environment.
        failed: called on another thread if the raylet refuses or does not answer.
    """
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.common_pb2 import PYTHON
    from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
    from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
    from ray.core.generated.runtime_environment_pb2 import RuntimeEnvConfig, RuntimeEnvInfo, RuntimeEnvUris

    request = PrestartWorkersRequest(
        language=PYTHON,
        job_id=bytes.fromhex(job_id),
        runtime_env_info=RuntimeEnvInfo(
            serialized_runtime_env=environment,
            uris=RuntimeEnvUris(working_dir_uri=working_dir),
            runtime_env_config=RuntimeEnvConfig(setup_timeout_seconds=setup_s, eager_install=True),
        ),
        keep_alive_duration_secs=int(keep_s),
        num_workers=number,
    )
    channel = init_grpc_channel(raylet)

    def answered(call: Any) -> None:
        error = call.exception()
        if error is not None:
            failed(error)
        channel.close()

    NodeManagerServiceStub(channel).PrestartWorkers.future(request, timeout=timeout_s).add_done_callback(answered)


def answer_for_ray_train(answers: Any) -> None:
    """Whatever `ray.train` is asked in this process from now on, `answers` is asked; None if it answers nothing.

    Why: `ray.train.report` and its siblings in the training function reach Shoal. Ray Train's own docstring of the
    class that `answers` stands for says that it can be replaced for other behaviour.
    Without: a script would have to import other functions, so it would not run unchanged.
    Public: none.
    """
    from ray.train.v2._internal.execution import train_fn_utils

    train_fn_utils.set_train_fn_utils(answers)


def names_of_answers() -> frozenset[str]:
    """What such an object has to have.

    Why, Without, Public: as of `answer_for_ray_train`; a test compares, so a new question of a new release is noticed.
    """
    from ray.train.v2._internal.execution.train_fn_utils import TrainFnUtils

    return frozenset(TrainFnUtils.__abstractmethods__)


def make_training_result(
    *,
    metrics: dict[str, Any] | None,
    checkpoint: Any,
    path: str,
    filesystem: Any,
    best_checkpoints: list[tuple[Any, dict[str, Any]]],
    return_value: Any,
) -> Any:
    """Return the `ray.train.Result` of a training that has succeeded.

    Why: `fit()` returns one. Ray's documentation calls its constructor private.
    Without: `Result.from_path` alone, which has no metrics of a run without checkpoints, and logs that a run was found.
    Public: `ray.train.Result.from_path`.
    """
    import pandas  # type: ignore[import-untyped]
    import ray.train

    return ray.train.Result(
        metrics=metrics,
        checkpoint=checkpoint,
        error=None,
        path=path,
        metrics_dataframe=pandas.DataFrame([reported for _, reported in best_checkpoints])
        if best_checkpoints
        else None,
        best_checkpoints=best_checkpoints,
        return_value=return_value,
        _storage_filesystem=filesystem,
    )


def split_datasets(config: Any, names: Sequence[str]) -> frozenset[str]:
    """Which of these datasets a `ray.train.DataConfig` splits among the ranks; the others are read whole by each.

    Why: Shoal splits them itself, to know which rows were read.
    Without: `DataConfig.configure` splits, in an order that differs from run to run, so no position could be kept.
    Public: `DataConfig.configure`.
    """
    chosen = config._datasets_to_split
    return frozenset(names if chosen == "all" else chosen)


def bundles_of(dataset: Any) -> Any:
    """Run a dataset, and yield a reference to each block with its number of rows, in the order of the dataset.

    Why: blocks are assigned to ranks by their rows, without passing through the process that assigns.
    Without: all data would pass through it (`Dataset.iter_batches`).
    Public: `Dataset.iter_internal_ref_bundles`, whose elements are not.
    """
    dataset.context.execution_options.preserve_order = True
    for bundle in dataset.iter_internal_ref_bundles():
        for entry in bundle.blocks:
            reference, metadata = (entry.ref, entry.metadata) if hasattr(entry, "ref") else entry
            if metadata.num_rows:
                yield reference, metadata.num_rows


def shard_iterator(shard: Any) -> Any:
    """A `ray.data.DataIterator` over the blocks of a `shard` (`ray_train/shards.py`), which it tells what it hands out.

    Why: `ray.train.get_dataset_shard` returns a DataIterator, with all ways of reading: batches for torch, rows,
    shuffled. Without: those ways would have to be written again.
    Public: `ray.data.DataIterator`; what a class of its own has to define, and where batches leave it, is not.
    """
    from ray.data import DataContext, DataIterator
    from ray.data._internal.execution.interfaces import RefBundle
    from ray.data._internal.stats import DatasetStats
    from ray.data.block import BlockAccessor

    import ray

    try:
        from ray.data._internal.execution.interfaces import BlockEntry
    except ImportError:  # before Ray 2.60

        def BlockEntry(ref: Any, metadata: Any) -> Any:  # noqa: N802
            return ref, metadata

    class ShardIterator(DataIterator):  # type: ignore[misc]
        by_row = False

        def _to_ref_bundle_iterator(self) -> Any:
            def bundles() -> Any:
                for reference, first, last in shard.blocks():
                    block = ray.get(reference)
                    accessor = BlockAccessor.for_block(block)
                    if (first, last) != (0, accessor.num_rows()):
                        block = accessor.slice(first, last, copy=True)
                        accessor = BlockAccessor.for_block(block)
                        reference = ray.put(block)
                    entry = BlockEntry(ref=reference, metadata=accessor.get_metadata())
                    yield RefBundle(blocks=(entry,), schema=None, owns_blocks=False)

            return bundles(), DatasetStats(metadata={}, parent=None), None

        def _iter_batches(self, *, batch_size: int | None = 256, **options: Any) -> Any:
            batches = super()._iter_batches(batch_size=batch_size, **options)
            by_row, self.by_row = self.by_row, False

            def counted() -> Any:
                shard.begin(batch_size, is_shuffled=bool(options.get("local_shuffle_buffer_size")))
                try:
                    for number, batch in enumerate(batches):
                        if not by_row:
                            shard.took_batch(number, batch_size)
                        yield batch
                finally:
                    shard.end()

            return type(batches)(counted)

        def iter_rows(self) -> Any:
            self.by_row = True
            rows = super().iter_rows()

            def counted() -> Any:
                for row in rows:
                    shard.took_row()
                    yield row

            return type(rows)(counted)

        def materialize(self) -> Any:
            shard.begin(None, is_shuffled=True)  # all at once, so there is no position in it
            try:
                return super().materialize()
            finally:
                shard.end()

        def stats(self) -> str:
            return "Shoal keeps no statistics of shards."

        def schema(self) -> Any:
            return shard.schema()

        def get_context(self) -> Any:
            context = DataContext.get_current().copy()
            context.execution_options.preserve_order = True
            return context

        def __repr__(self) -> str:
            return f"ShardIterator({self.schema()})"

    return ShardIterator()
