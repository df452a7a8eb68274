"""The environment of a script's process: what torchrun, `accelerate launch` and DeepSpeed's launcher promise, and what
Shoal adds. Pure.

    RANK 0 1 | 2 3        rank of the worker, given by the supervisor
    LOCAL_RANK 0 1 | 0 1  its place among the workers of its node
    GROUP_RANK 0 0 | 1 1  its node, in the order of the lowest rank on each

torch.distributed.run documents the variables. MASTER_ADDR and MASTER_PORT are those of a store that the worker of
rank 0 hosts, and TORCHELASTIC_USE_AGENT_STORE says so: no rank of the script has to open that port itself. Called by
the runner when all ranks have published their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal_workers.contract import Assignment, Frozen, JobSpec, Launcher, MediaRanks
from shoal_workers.contract.media import MediaSpec

HOOK = "SHOAL_HOOK"
"""Address of the socket to which the package `shoal` sends what the script logs."""
MEDIA = "SHOAL_MEDIA"
"""Where this rank's media go, as a `MediaTarget`; not set: what it logs besides numbers is not kept."""
CHECKPOINT_DIR = "SHOAL_CHECKPOINT_DIR"
DEVICES = "CUDA_VISIBLE_DEVICES"
BREAKPOINT = "PYTHONBREAKPOINT"
RAY_ADDRESS = "RAY_ADDRESS"
"""Where `ray.init()` of a script finds the cluster of its worker, for Ray Data."""
_OF_THE_WORKER = ("SHOAL_PRELOAD", "SHOAL_IDLE_S", "SHOAL_FORK_SERVER")
"""Variables of the worker's process that mean nothing to a script."""
_ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_CPU_AFFINITY": "0",
}
"""What `accelerate launch` sets without a configuration file. `code.env` may set others."""


class Place(Frozen):
    """What a rank publishes to the others before its script begins."""

    node_id: str
    devices: str
    """The GPUs of the worker, as CUDA_VISIBLE_DEVICES names them; empty: none."""
    store_port: int = 0
    """Port of the store for the scripts; 0: this is not rank 0."""


class MediaTarget(Frozen):
    """Where a script's process writes what it logs besides numbers, and as whom."""

    root: str
    """URL of the job's checkpoint directory."""
    attempt: int
    generation: int
    rank: int
    settings: MediaSpec
    """`media` of the spec."""

    @staticmethod
    def of(spec: JobSpec, assignment: Assignment, root: str) -> MediaTarget | None:
        """None if this rank's are not kept."""
        if not spec.media.enabled or (assignment.rank and spec.media.ranks is not MediaRanks.ALL):
            return None
        return MediaTarget(
            root=root,
            attempt=assignment.attempt,
            generation=assignment.generation,
            rank=assignment.rank,
            settings=spec.media,
        )


def environment_of(
    own: Mapping[str, str],
    spec: JobSpec,
    assignment: Assignment,
    places: Sequence[Place],
    *,
    checkpoint_dir: str,
    hook: str,
    interface: str | None,
    ray_address: str = "",
) -> dict[str, str]:
    """Return the whole environment of this rank's process.

    Args:
        own: that of the worker, with the variables and secrets of the spec.
        places: by rank.
        interface: the network interface towards rank 0; None means gloo's default.
        ray_address: of the Ray cluster of the worker; empty: there is none.
    """
    assert spec.script is not None
    environment = {name: value for name, value in own.items() if name not in _OF_THE_WORKER}
    if environment.get(BREAKPOINT, "").startswith("ray."):  # Ray's debugger waits for someone to attach
        del environment[BREAKPOINT]
    environment |= {CHECKPOINT_DIR: checkpoint_dir, HOOK: hook}
    if (target := MediaTarget.of(spec, assignment, checkpoint_dir)) is not None:
        environment[MEDIA] = target.model_dump_json()
    environment.setdefault("OMP_NUM_THREADS", str(max(1, int(spec.worker.cpus))))
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    if spec.script.launcher is Launcher.PYTHON:
        return environment
    environment |= _of_torchrun(own, spec, assignment, places)
    if spec.script.launcher is Launcher.RAY_TRAIN and ray_address:
        environment[RAY_ADDRESS] = ray_address
    if spec.script.launcher is Launcher.ACCELERATE:
        environment = {**_ACCELERATE, "ACCELERATE_USE_CPU": str(not spec.worker.gpus), **environment}
    if spec.script.launcher is Launcher.DEEPSPEED_ENV:  # deepspeed/launcher/launch.py
        of_deepspeed = {"LOCAL_SIZE": "LOCAL_WORLD_SIZE", "CROSS_RANK": "GROUP_RANK", "CROSS_SIZE": "GROUP_WORLD_SIZE"}
        environment |= {name: environment[same] for name, same in of_deepspeed.items()}
    return environment


def _of_torchrun(
    own: Mapping[str, str], spec: JobSpec, assignment: Assignment, places: Sequence[Place]
) -> dict[str, str]:
    node_id = places[assignment.rank].node_id
    local = [rank for rank, place in enumerate(places) if place.node_id == node_id]
    nodes = list(dict.fromkeys(place.node_id for place in places))
    rank, world_size = str(assignment.rank), str(len(places))
    devices = ",".join(filter(None, (places[rank].devices for rank in local)))
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local.index(assignment.rank)),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(len(local)),
        "GROUP_RANK": str(nodes.index(node_id)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": assignment.store_host,
        "MASTER_PORT": str(places[0].store_port),
        "TORCHELASTIC_RUN_ID": assignment.job_id,
        "TORCHELASTIC_RESTART_COUNT": str(assignment.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.retry.max_recoveries),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": own.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    } | ({DEVICES: devices} if devices else {})
