"""The processes of one generation, and what they exchange outside of torch.distributed: a byte string each, by a store.

The store is that of the group (MASTER_ADDR, MASTER_PORT), which the worker of rank 0 hosts. It outlives the scripts'
own process groups, so it also carries the function that rank 0 sends before there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_FOREVER = timedelta(days=3650)
"""Whoever waits is ended by its worker when the group ends."""
_LEAVES = b"leaves"


class Group:
    """This process among the others. Main thread only: every rank makes the same calls in the same order.

    Args:
        environment: what torchrun promises.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.rank = int(environment["RANK"])
        self.world_size = int(environment["WORLD_SIZE"])
        self.local_rank = int(environment["LOCAL_RANK"])
        self.local_world_size = int(environment["LOCAL_WORLD_SIZE"])
        self.node_rank = int(environment["GROUP_RANK"])
        self.number = int(environment["TORCHELASTIC_RESTART_COUNT"]) + 1
        self.job = environment["TORCHELASTIC_RUN_ID"]
        store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False, timeout=_FOREVER)
        self._store = PrefixStore("ray_train", store)
        self._number_of_call = 0

    def store_of(self, number: int) -> PrefixStore:
        """Return the store of the process groups of the n-th `fit()`. In one store, a second process group would find
        the addresses of the first."""
        return PrefixStore(f"fit/{number}", self._store)

    def announce(self, name: str, value: bytes) -> None:
        """Let `awaited(name)` return this on every rank. Called on one rank."""
        self._store.set(name, value)  # type: ignore[arg-type]  # bytes are accepted, and come back as they are

    def awaited(self, name: str) -> bytes:
        self._store.wait([name], _FOREVER)
        return bytes(self._store.get(name))

    def exchange(self, value: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """A barrier: rank 0 decides, from the values of all ranks in their order, what is returned on every rank."""
        self._number_of_call += 1
        call = f"call/{self._number_of_call}"
        self.announce(f"{call}/{self.rank}", value)
        if self.rank == 0:
            names = [f"{call}/{rank}" for rank in range(self.world_size)]
            self._store.wait(names, _FOREVER)
            values = [bytes(self._store.get(name)) for name in names]
            _check_that_all_leave(values)
            self.announce(call, decide(values))
            # Every rank has come, so each has read the answer before.
            for name in [*names, f"call/{self._number_of_call - 1}"]:
                self._store.delete_key(name)
        return self.awaited(call)

    def leave(self) -> None:
        """Wait for all ranks after the training function: nobody leaves while others are in a collective."""
        self.exchange(_LEAVES, lambda _: _LEAVES)


def _check_that_all_leave(values: Sequence[bytes]) -> None:
    """Raise if some ranks leave, and others do not."""
    leaving = [rank for rank, value in enumerate(values) if value == _LEAVES]
    if leaving and len(leaving) < len(values):
        staying = [rank for rank in range(len(values)) if rank not in leaving]
        raise RuntimeError(
            f"the training function has returned on rank {', '.join(map(str, leaving))}, and rank "
            f"{', '.join(map(str, staying))} is in ray.train.report(), or in another call of ray.train for all ranks. "
            "Make these calls on every rank, as often as on the others."
        )
