"""The process group of one generation: made, woken, and taken down without a trace, any number of times per process.

    training thread   form() ........ collectives ........ dissolve()
    control thread            wake() wake() wake() ...

The training thread owns it; only `wake` may be called from another thread. Nothing of a generation may outlive
dissolve: a mesh, a model or a cache that still points to the old group keeps its sockets and threads alive, and may
make DTensor resolve a group by a name that by then means another one.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistError
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as redistribute

from shoal_workers.contract.messages import Assignment
from shoal_workers.engine.errors import EngineError, Fenced, FormFailed
from shoal_workers.engine.group.gloo_sockets import Address, GlooSockets
from shoal_workers.engine.group.mesh import Meshes, build_mesh
from shoal_workers.engine.group.network_interface import choose_interface
from shoal_workers.engine.group.rendezvous import Rendezvous

_PARTING_S = 2.0
_BURIAL_S = 0.1


class Group:
    """One generation's membership in one process."""

    def __init__(self, assignment: Assignment, device: torch.device, check: Callable[[], None]) -> None:
        self._assignment = assignment
        self._device = device
        self._check = check
        self._rendezvous = Rendezvous(assignment, check)
        self._sockets = GlooSockets()
        self._is_aborted = False
        self.is_formed = False

    def form(self) -> Meshes:
        """Meet the other members and make all groups.

        Raises:
            FormFailed: somebody is missing, or the store is.
            Fenced: the supervisor gave this generation up meanwhile.
        """
        a = self._assignment
        choose_interface(a.store_host, a.store_port)
        self._sockets.watch_store(self._rendezvous.addresses())
        self._rendezvous.connect()
        # All must be here before torch begins to connect them: its own waits cannot be interrupted.
        self._rendezvous.gather("here", str(os.getpid()))
        self._sockets.before_groups()
        if self._device.type == "cuda":
            _tame_nccl()
        try:
            dist.init_process_group(
                "gloo" if self._device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=PrefixStore("groups", self._rendezvous.store),
                rank=a.rank,
                world_size=a.world_size,
                timeout=timedelta(seconds=a.collective_timeout_s),
            )
            meshes = build_mesh(a.layout, self._device.type, a.collective_timeout_s, a.rank)
        except RuntimeError as error:
            raise FormFailed(f"the process group of {a.world_size} ranks did not come up: {error}") from error
        listening = self._rendezvous.gather("listening", json.dumps(sorted(self._sockets.after_groups())))
        self._sockets.learn_peers(_addresses(listening))
        self.is_formed = True
        return meshes

    def gather(self, what: str, value: str) -> list[str]:
        """Training thread, all ranks: every rank's `value`, by rank. Raises as `form` does."""
        return self._rendezvous.gather(what, value)

    def wake(self) -> None:
        """Any thread: free the training thread from whatever collective or store call it waits in. Call it again."""
        self._sockets.sweep()
        if self._device.type == "cuda" and self.is_formed and not self._is_aborted:
            self._is_aborted = True
            _abort_nccl()

    def connections(self) -> list[str]:
        """Any thread: what `wake` shuts and nobody has closed yet, for people."""
        return self._sockets.describe()

    def leave_if_lost(self) -> None:
        """Training thread, while it waits in a collective of gloo: raises Fenced once nothing can come of it any more.

        Not before every connection is closed: the group's own thread may still be writing into the buffers until then.
        """
        try:
            self._check()
        except Fenced:
            if self._sockets.are_all_closed():
                raise

    def part(self) -> None:
        """At a clean end, all ranks: nobody closes a connection that another still reads from."""
        try:
            self._rendezvous.gather("parting", "", timeout_s=_PARTING_S)
        except (EngineError, DistError):  # the others are gone, which is what we were waiting for
            pass

    def dissolve(self, *, is_clean: bool) -> None:
        """Training thread, after every end, once nothing on its stack holds the model any more."""
        groups: list[dist.ProcessGroup] = []
        if dist.is_initialized():
            groups += dist.distributed_c10d._world.pg_map
            dist.destroy_process_group()
        self._rendezvous.close()
        _forget_meshes()
        gc.collect()
        _bury(groups, self.wake if not is_clean else None)  # at last: whoever drops the last reference may have to wait


def _bury(groups: list[dist.ProcessGroup], wake: Callable[[], None] | None) -> None:
    """Drop the last references. A group's end waits for its outstanding operations, which may take until their timeout
    where gloo has lost one, so that is left to a thread of its own; in nearly all cases it is done at once."""
    if not groups:
        return

    def drop() -> None:
        if wake is not None:
            wake()
        groups.clear()

    group_reaper = threading.Thread(target=drop, name="shoal-group_reaper", daemon=True)
    group_reaper.start()
    group_reaper.join(_BURIAL_S)


def _addresses(said: list[str]) -> frozenset[Address]:
    return frozenset((str(host), int(port)) for line in said for host, port in json.loads(line))


def _tame_nccl() -> None:
    """A communicator that breaks ends a generation, not the process: clean up only, and no watchdog that aborts us."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def _abort_nccl() -> None:
    for group in list(dist.distributed_c10d._world.pg_map):
        group._get_backend(torch.device("cuda")).abort()


def _forget_meshes() -> None:
    """DTensor caches by mesh, and a mesh equals the next generation's though its groups are other ones.

    The sharding caches are per thread, so this must run on the thread that trains.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    propagator._propagate_tensor_meta_cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    redistribute.clear_redistribute_planner_cache()
    for value in vars(redistribute).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()
