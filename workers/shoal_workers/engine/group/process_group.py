"""The process group of one generation: formed, woken and destroyed, any number of times per worker. Hides in
which order torch's groups, their store and DTensor's caches are made and dropped.

    training thread   form() ........ collectives ........ destroy()
    control thread            wake() wake() wake() ...

The training thread owns it; other threads may only call `wake` and `connections`. Nothing may refer to the group after
`destroy`: a mesh, a model or a cache that still points to it keeps its sockets and threads alive, and may make DTensor
resolve a group by a name that by then belongs to another one.

`GenerationScope` is a generation as the control thread sees it. After an interrupt its sweeper, a thread, wakes the
training thread every 20 ms until that has left. The sweeper is joined before the next generation begins, so it can
never touch a socket of the next one. Called by the engine.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore

from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.suspects import Link
from shoal_workers.engine.generation_ends import EngineError, Fenced, FormFailed
from shoal_workers.engine.group.all_ranks import RankGrid, make_separate_groups, set_all_ranks
from shoal_workers.engine.group.collectives import CollectiveLog
from shoal_workers.engine.group.gloo import GlooSockets, LinkMeter, bounded_connecting, shorten_addresses
from shoal_workers.engine.group.mesh import Meshes, build_mesh
from shoal_workers.engine.group.network_interface import choose_interface
from shoal_workers.engine.group.rendezvous import Rendezvous, StoreConnections
from shoal_workers.engine.group.store.client import GenerationStore
from shoal_workers.torch_internals import (
    abort_nccl,
    all_groups,
    clear_dtensor_caches,
    forget_group_names,
    keep_random_states,
)

_CLEAN_END_S = 2.0
_DROP_S = 0.1


class Group:
    """The process group of one generation in one worker.

    Args:
        check: raises Fenced once the generation is over.
        on_connecting: called on the training thread when all ranks have arrived, before they connect to each other.
        has_gradients: also makes `gradients`.
        by_axis: collectives of all ranks go along the axes of the mesh; None means with NCCL. See all_ranks.py.
    """

    def __init__(
        self,
        assignment: Assignment,
        device: torch.device,
        connections: StoreConnections,
        *,
        check: Callable[[], None],
        on_connecting: Callable[[], None] = lambda: None,
        has_gradients: bool = False,
        by_axis: bool | None = None,
    ) -> None:
        self._assignment = assignment
        self._device = device
        self._check = check
        self._on_connecting = on_connecting
        self._has_gradients = has_gradients
        self._by_axis = device.type == "cuda" if by_axis is None else by_axis
        self.gradients: RankGrid | None = None
        """All ranks once more, for sums that run beside other collectives; None if there is one rank, or no need."""
        self._rendezvous = Rendezvous(assignment, connections, check)
        self._sockets = GlooSockets()
        self._links = LinkMeter()
        self.collectives = CollectiveLog()
        self._is_aborted = False
        self.is_formed = False

    def form(self) -> Meshes:
        """Wait for the other ranks and make all groups.

        Raises:
            FormFailed: a rank is missing, or the store cannot be reached.
            Fenced: the supervisor has fenced this generation.
        """
        a = self._assignment
        choose_interface(a.store_host, a.store_port)
        self._rendezvous.connect()
        # All ranks must have arrived before torch begins to connect them: its own waits cannot be interrupted.
        self._rendezvous.arrive("arrived")
        backend = backend_of(self._device.type, a.layout)
        has_gloo = "gloo" in backend
        store = self._rendezvous.store
        if has_gloo:
            shorten_addresses()
            store.set_timeout(timedelta(seconds=a.connect_s))  # gloo reads addresses with the store's own
            self._sockets.before_groups()
        if self._device.type == "cuda":
            _configure_nccl()
        self._on_connecting()
        timeout = timedelta(seconds=a.collective_timeout_s)
        try:
            with bounded_connecting(self._check, a.connect_s):
                # Without `device_id`: with it, NCCL connects all ranks here.
                dist.init_process_group(
                    backend,
                    store=PrefixStore("groups", store),
                    rank=a.rank,
                    world_size=a.world_size,
                    timeout=timeout,
                )
                meshes = build_mesh(a.layout, self._device.type, a.collective_timeout_s, a.rank)
                grid = RankGrid.from_mesh(meshes.root) if self._by_axis else RankGrid.from_default_group()
                set_all_ranks(grid)
                if self._device.type == "cuda":
                    keep_random_states(meshes.root)
                if self._has_gradients and a.world_size > 1:
                    self.gradients = make_separate_groups(grid, meshes.root, timeout)
        except RuntimeError as error:
            # A fenced generation ends as Fenced, whatever its broken connections raise.
            self._check()
            raise FormFailed(f"the process group of {a.world_size} ranks did not come up: {error}") from error
        if has_gloo:
            own = json.dumps(sorted(self._sockets.after_groups()))
            listening = self._rendezvous.gather("listening", own, timeout_s=a.connect_s)
            addresses = (address for line in listening for address in json.loads(line))
            self._sockets.learn_peers((str(host), int(port)) for host, port in addresses)
        store.set_timeout(timedelta(seconds=a.collective_timeout_s))  # NCCL connects in a group's first collective
        self.is_formed = True
        return meshes

    def gather(self, what: str, value: str) -> list[str]:
        """Training thread, all ranks, after `form`: every rank's `value`, by rank. Raises as `form` does."""
        return self._rendezvous.gather(what, value, timeout_s=self._assignment.collective_timeout_s)

    def decide(self, what: str, value: str, decision: Callable[[list[str]], str]) -> str:
        """Training thread, all ranks, after `form`: what rank 0 decides from the values of all ranks. Raises as `form`
        does. The wait may be long: another rank may still build its model, or read its state."""
        limit_s = self._assignment.collective_timeout_s
        return self._rendezvous.decide(what, value, decision, timeout_s=limit_s)

    def wake(self) -> None:
        """Called from any thread: wakes the training thread out of the collective or store call that it waits in.

        One call does not always succeed; call it again until the training thread has left."""
        self._rendezvous.wake()
        self._sockets.sweep()
        if self._device.type == "cuda" and self.is_formed and not self._is_aborted:
            self._is_aborted = True
            abort_nccl()

    def connections(self) -> list[str]:
        """Returns, on any thread, the connections that `wake` shuts down and that are still open, as text for
        people."""
        return self._sockets.describe()

    def sample_links(self) -> None:
        """Called from any thread every few seconds: notes what `links` compares with."""
        self._links.sample(self._sockets.connections())

    def links(self) -> tuple[Link, ...]:
        """Returns, on any thread, the connections to other ranks, by node."""
        return self._links.links(self._sockets.connections())

    def leave_if_lost(self) -> None:
        """Training thread, while it waits in a gloo collective: raises Fenced if the collective can no longer complete.

        Not before every connection is closed: until then the group's own thread may write into the buffers.
        """
        try:
            self._check()
        except Fenced:
            if self._sockets.are_all_closed():
                raise

    def wait_for_others(self) -> None:
        """Called by all ranks at a clean end: no rank closes a connection that another rank still reads from."""
        try:
            self._rendezvous.arrive("leaving", timeout_s=_CLEAN_END_S)
        except (EngineError, Fenced, DistError):  # the others are gone already
            pass

    def destroy(self, *, is_clean: bool) -> None:
        """Training thread, after every end, once nothing on its stack refers to the model any more."""
        groups: list[dist.ProcessGroup] = []
        self.gradients = None
        set_all_ranks(None)
        if dist.is_initialized():
            groups += all_groups()  # else torch frees them here, and a lost operation blocks until its timeout
            dist.destroy_process_group()
        # Names of groups are counted. A rank whose first group failed has counted it, and destroys nothing; other ranks
        # may have made theirs. In the next generation they would wait for each other under different names.
        forget_group_names()
        store = self._rendezvous.close()
        # They take equal meshes of two generations for the same one, and hold the old one with its groups' names.
        clear_dtensor_caches()
        gc.collect()  # meshes and models are in cycles; each that stays keeps the sockets and threads of its group
        _drop(groups, store, self.wake if not is_clean else None)  # last, because it may have to wait


def backend_of(device_type: str, layout: Layout) -> str:
    """The backend of all groups, as torch spells it.

    gloo connects every pair of ranks when a group is made. So with GPUs it is left out, unless offloaded parameters
    put gradients on the host, of which `PartialGradients` and `ExactGradients` sum some. Every other collective of the
    engine is of tensors on the worker's device.
    """
    if device_type == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if layout.offload else "nccl"


def _drop(groups: list[dist.ProcessGroup], store: GenerationStore | None, wake: Callable[[], None] | None) -> None:
    """Drop the last references to the groups, on a thread of its own, and then the last one to their store.

    A group's destructor waits for its outstanding operations. If gloo has lost one, that takes until the timeout; in
    nearly all other cases it is immediate."""
    if not groups:
        return

    def drop() -> None:
        if wake is not None:
            wake()
        groups.clear()
        kept.clear()

    kept = [store]
    # At a clean end no operation is lost, and the interpreter must wait: Python ends a daemon thread that comes back
    # from a destructor of C++ in a way that terminates the process.
    group_reaper = threading.Thread(target=drop, name="shoal-group-reaper", daemon=wake is not None)
    group_reaper.start()
    group_reaper.join(_DROP_S)


def _configure_nccl() -> None:
    """A broken communicator ends a generation, not the worker: NCCL cleans up only, without an aborting watchdog."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


_SWEEP_S = 0.02
_STUCK_S = 1.0
"""Waking takes some tens of milliseconds; after the supervisor's `quiesce_s` the worker is killed."""


class GenerationScope:
    """Created and left by the training thread, woken by the control thread.

    Args:
        log: writes a line into the job's log; called on any thread.
    """

    def __init__(self, generation: int, group: Group, log: Callable[[str], None]) -> None:
        self.generation = generation
        self.group = group
        self._log = log
        self._training_thread_id = threading.get_ident()
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._sweeper: threading.Thread | None = None

    def interrupt_until_left(self) -> None:
        """Start the sweeper, which wakes the training thread until it has left. Idempotent; returns at once."""
        with self._lock:
            if self._sweeper is None and not self._left.is_set():
                self._sweeper = threading.Thread(target=self._sweep, name="shoal-sweeper", daemon=True)
                self._sweeper.start()

    def leave(self) -> None:
        """After this call no thread touches the group's sockets any more."""
        with self._lock:
            # Under the lock: no sweeper can start after this, so the join below ends the last one.
            self._left.set()
        if self._sweeper is not None:
            self._sweeper.join()

    def _sweep(self) -> None:
        stuck_at = time.monotonic() + _STUCK_S
        is_logged = False
        while True:
            self.group.wake()
            if self._left.wait(_SWEEP_S):
                return
            if not is_logged and time.monotonic() > stuck_at:
                is_logged = True
                self._log_where_it_is_stuck()

    def _log_where_it_is_stuck(self) -> None:
        connections = ", ".join(self.group.connections()) or "none"
        self._log(f"cannot be woken out of generation {self.generation}; open connections of the group: {connections}")
        frame = sys._current_frames().get(self._training_thread_id)
        for line in "".join(traceback.format_stack(frame)).splitlines() if frame is not None else ():
            self._log(line)
