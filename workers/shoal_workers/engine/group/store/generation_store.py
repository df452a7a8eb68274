"""The store of one generation behind torch's Store interface: what gloo and NCCL exchange while they connect.

torch calls it from C++ through a trampoline, with the interpreter's lock held, on whichever thread makes a group; an
exception raised here reaches the caller of torch unchanged. The trampoline looks methods up on the Python object, so
this object must live as long as any group that was made with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from shoal_workers.engine.errors import Fenced
from shoal_workers.engine.group.store.connection import StoreConnection
from shoal_workers.engine.group.store.messages import Operation, Outcome, Space, split

_SHOWN = 4
"""Keys in a message."""


class GenerationStore(Store):
    """Keys of one generation at one server.

    Every call raises what `check` raises, and DistStoreError if the store is lost, the timeout passes, or a newer
    generation uses it already.

    Args:
        check: raises Fenced once the generation is over; called at every wake-up of a wait.
    """

    def __init__(
        self, connection: StoreConnection, space: Space, *, check: Callable[[], None], timeout: timedelta
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._connection = connection
        self._space = space
        self._check = check
        self._is_closed = False
        self._clones: list[GenerationStore] = []
        """torch calls a clone through its Python object, so that must live, too."""

    def close(self) -> None:
        """Any thread: from now on every call raises DistStoreError, also of clones. The connection is not closed, but
        those of clones are."""
        self._is_closed = True
        for clone in self._clones:
            clone.close()
            clone._connection.close()

    def wake(self) -> None:
        """Any thread: a wait, also of a clone, calls `check` now."""
        self._connection.wake()
        for clone in self._clones:
            clone.wake()

    @property
    def _timeout(self) -> timedelta:
        """As torch keeps it, and sets it through a PrefixStore."""
        return self.timeout  # type: ignore[attr-defined, no-any-return]  # torch's stub lacks it

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Operation.SET, key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(Operation.SET, *(field for pair in zip(keys, values, strict=True) for field in pair))

    def get(self, key: str) -> bytes:
        """Waits until the key exists."""
        return self._ask(Operation.GET, key)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits until all keys exist."""
        return list(self._ask(Operation.GET, *keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(Operation.WAIT, *keys, timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(Operation.CHECK, *keys) == (b"1",)

    def add(self, key: str, value: int) -> int:
        return int(self._ask(Operation.ADD, key, str(value))[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(Operation.APPEND, key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(Operation.COMPARE_SET, key, expected_value, desired_value)[0]

    def delete_key(self, key: str) -> bool:
        return self._ask(Operation.DELETE, key) == (b"1",)

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._ask(Operation.KEYS)]

    def num_keys(self) -> int:
        return len(self.list_keys())

    def gather(self, name: str, rank: int, num_ranks: int, value: str, timeout: timedelta) -> list[str]:
        """Waits until all ranks have given a value under this name, with `gather` or `arrive`: all values, by rank."""
        (joined,) = self._ask(Operation.GATHER, name, str(rank), str(num_ranks), value, timeout=timeout)
        return [one.decode() for one in split(joined)]

    def arrive(self, name: str, rank: int, num_ranks: int, value: str, timeout: timedelta) -> None:
        """As `gather`, but the values stay at the store."""
        self._ask(Operation.ARRIVE, name, str(rank), str(num_ranks), value, timeout=timeout)

    def absent(self, name: str, num_ranks: int) -> list[int]:
        """The ranks that have not given a value under this name yet."""
        return [int(rank) for rank in self._ask(Operation.ABSENT, name, str(num_ranks))]

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> GenerationStore:
        """The same keys with a connection of its own: its calls do not wait for those of this store."""
        host, port = self._connection.address
        if self._is_closed:
            raise DistStoreError(f"generation {self._space.generation} has left the rendezvous store")
        try:
            connection = self._connection.another(self._check)
        except OSError as error:
            raise DistStoreError(f"the rendezvous store at {host}:{port} cannot be reached again: {error}") from None
        self._clones.append(GenerationStore(connection, self._space, check=self._check, timeout=self._timeout))
        return self._clones[-1]

    # The names by which torch's trampoline looks up two of them.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _ask(self, operation: Operation, *operands: str | bytes, timeout: timedelta | None = None) -> tuple[bytes, ...]:
        timeout_s = (self._timeout if timeout is None else timeout).total_seconds()
        host, port = self._connection.address
        if self._is_closed:
            raise DistStoreError(f"generation {self._space.generation} has left the rendezvous store")
        try:
            answer = self._connection.request(
                operation,
                self._space,
                tuple(one.encode() if isinstance(one, str) else one for one in operands),
                check=self._check,
                deadline_mono=time.monotonic() + timeout_s,
            )
        except TimeoutError:
            names = operands if operation in (Operation.GET, Operation.WAIT) else operands[:1]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            what = f"{operation} {', '.join(map(str, names[:_SHOWN]))}{more}".rstrip()
            # "wait timeout" is how torch's own stores word it, and how callers know it
            message = (
                f"the rendezvous store at {host}:{port} did not answer {what} within {timeout_s:g} s (wait timeout)"
            )
            raise DistStoreError(message) from None
        except OSError as error:
            self._check()
            raise DistStoreError(f"the rendezvous store at {host}:{port} was lost: {error}") from None
        match answer.outcome:
            case Outcome.DONE:
                return answer.values
            case Outcome.STALE:
                newest = answer.values[0].decode()
                raise Fenced(f"generation {self._space.generation} is over: the store is used by generation {newest}")
            case Outcome.REFUSED:
                raise DistStoreError(f"the rendezvous store refused {operation}: {answer.values[0].decode()}")
