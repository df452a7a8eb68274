"""Replays log entries on a whole copy, and so makes the part of any logged step: bit for bit what the partner had.
Hides which entries lead from which copy to which step.

    whole copy of step 10 (its file)  --copy-->  a free buddy slot  --entries 11, 12, 13-->  the part of step 13

    whole copies   10                        26
    entries            11  12  13 ... 25  26     27  28  30     (step 29 was skipped: 30 has previous 28)
    replayable     10  11  12 ........... 25 26  27  28  30

Reads nothing but files of this node, so any of its processes can do this, also if the process that received them is
dead. The copy is read before anything else; if it or an entry is overwritten meanwhile, the replay begins again.

Now and then a whole copy is compared with the replay of its step (`Comparison`). Two machines made them from the same
numbers, so all bits must be equal: a difference is corruption. The two alone do not show which of them is wrong.

Called by the server, for a part that is read and after it has received a copy, and by the receiver of a log that has no
room left.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal_workers.checkpoint.index import ShardIndex
from shoal_workers.snapshot_store.log.records import (
    START_BYTES,
    Commit,
    LogHead,
    decode,
    platform,
    previous_of,
    views_of,
)
from shoal_workers.snapshot_store.log.rules import rule_of
from shoal_workers.snapshot_store.slots.buddy_slots import BuddySlots, OutdatedCopy
from shoal_workers.snapshot_store.slots.registry import SlotRegistry
from shoal_workers.snapshot_store.slots.slot_files import (
    PartHeader,
    Regions,
    SlotFile,
    Stamp,
    read_header,
    read_sequence,
)
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull

_TRIES = 3
_EXTRA_HEADROOM_BYTES = 4096


class ReplayFailed(Exception):
    """The message is the reason in words."""


class _Overwritten(Exception):
    """A file changed while it was read."""


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    header: PartHeader


@dataclass(frozen=True, slots=True)
class Replayable:
    """A part that can be made; `header` is that of the whole copy from which it starts."""

    header: PartHeader
    step: int


class Replayer:
    """Called from any thread."""

    def __init__(self, registry: SlotRegistry, buddies: BuddySlots) -> None:
        self._registry = registry
        self._buddies = buddies
        self._making = threading.Lock()

    def replayable(self) -> Iterator[Replayable]:
        """Yields every part that can be made from the files of this node, and is not there as a file."""
        links = self._links()
        if not links:
            return
        copies: dict[tuple[int, int], dict[int, _Source]] = defaultdict(dict)
        for path, header in self._registry.parts():
            copies[header.generation, header.rank][header.step] = _Source(path, header)
        for key, known in links.items():
            bases = copies.get(key, {})
            for step in sorted(replayable(bases, known)):
                yield Replayable(bases[max(base for base in bases if base < step)].header, step)

    def make(
        self,
        generation: int,
        rank: int,
        step: int,
        *,
        keeps_copies: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Makes this part if the node has what it takes; False: it has not, or the part exists.

        `keeps_copies`: no other copy of the rank is overwritten if there is room.
        `check` is called between steps; if it raises, the part is not made. ReplayFailed if the files cannot be used.
        """
        with self._making:
            for _ in range(_TRIES):
                copies = {
                    header.step: _Source(path, header)
                    for path, header in self._registry.parts()
                    if (header.generation, header.rank) == (generation, rank)
                }
                links = self._links().get((generation, rank), {})
                links_made = chain(copies, links, step)
                if links_made is None or not links_made[1]:
                    return False
                base, path = links_made
                try:
                    self._make(copies[base], [links[link] for link in path], check, keeps_copies=keeps_copies)
                    return True
                except (_Overwritten, FileNotFoundError):
                    continue
            raise ReplayFailed(f"its files were overwritten {_TRIES} times while they were read")

    def differing(self, generation: int, rank: int, step: int, check: Callable[[], None]) -> tuple[str, ...] | None:
        """Names of the tensors in which the whole copy of this step differs from the replay of an older one.

        None if the node has not what it takes, or it was overwritten meanwhile. ReplayFailed as for `make`.
        """
        with self._making, ExitStack() as resources:
            copies = {
                header.step: _Source(path, header)
                for path, header in self._registry.parts()
                if (header.generation, header.rank) == (generation, rank)
            }
            links = self._links().get((generation, rank), {})
            differing_chain = chain(set(copies) - {step}, links, step)
            if step not in copies or differing_chain is None:
                return None
            try:
                base, newest = copies[differing_chain[0]], copies[step]
                fd = _open(resources, base)
                entries = [
                    _Entry(_open(resources, source := links[link]), source.header) for link in differing_chain[1]
                ]
                payload, expected = _payload(fd, base.header), _payload(_open(resources, newest), newest.header)
                index = ShardIndex.from_json(os.pread(fd, base.header.index_bytes, base.header.index_offset))
                state = _State(payload, index, entries[0].head())
                for entry in entries:
                    check()
                    state.apply(entry)
            except (_Overwritten, FileNotFoundError):
                return None
        spans = {item.fqn: slice(item.file_offset, item.file_offset + item.nbytes) for item in index.items}
        return tuple(name for name, span in spans.items() if not torch.equal(payload[span], expected[span]))

    def newest_step(self, generation: int, rank: int) -> int | None:
        """The newest step of the parts that exist or can be made."""
        steps = [h.step for _, h in self._registry.parts() if (h.generation, h.rank) == (generation, rank)]
        known = self._links().get((generation, rank), {})
        return max([*steps, *replayable(steps, known)], default=None)

    def _links(self) -> dict[tuple[int, int], dict[Link, _Source]]:
        """All complete entries of this node, by generation and rank."""
        links: dict[tuple[int, int], dict[Link, _Source]] = defaultdict(dict)
        for path, header, start in self._registry.entries(START_BYTES):
            links[header.generation, header.rank][Link(header.step, previous_of(start))] = _Source(path, header)
        return links

    def _make(self, base: _Source, entries: list[_Source], check: Callable[[], None], *, keeps_copies: bool) -> None:
        with ExitStack() as resources:
            copy = _open(resources, base)
            blobs = [_Entry(_open(resources, entry), entry.header) for entry in entries]
            head = blobs[0].head()
            if head.platform != platform():
                raise ReplayFailed(f"its log is from another platform: {head.platform}, here {platform()}")
            header = base.header
            last = decode(blobs[-1].extra())
            regions = Regions.of(
                index_bytes=header.index_bytes,
                extra_room=len(last.extra) + _EXTRA_HEADROOM_BYTES,
                num_bytes=header.num_bytes,
            )
            acquire = self._buddies.acquire_another if keeps_copies else self._buddies.acquire
            try:
                # `keep_step`: the copy that the replay starts from must not be the one that is overwritten.
                slot = acquire(regions, generation=header.generation, rank=header.rank, keep_step=header.step)
            except (SharedMemoryFull, OutdatedCopy) as error:
                raise ReplayFailed(str(error)) from None
            try:
                _copy(copy, header, slot, regions)
                payload = torch.frombuffer(slot.map, dtype=torch.uint8)[regions.payload_offset :]
                index = slot.map[regions.index_offset : regions.index_offset + regions.index_bytes]
                state = _State(payload, ShardIndex.from_json(bytes(index)), head)
                for entry in blobs:
                    check()
                    state.apply(entry)
                slot.map[regions.extra_offset : regions.extra_offset + len(last.extra)] = last.extra
                stamp = Stamp(header.generation, header.rank, header.world_size, last.commit.step)
                slot.finish(regions, stamp, num_extra_bytes=len(last.extra))
            finally:
                self._buddies.release(slot)


class _Entry:
    """One entry's file."""

    def __init__(self, fd: int, header: PartHeader) -> None:
        self._fd = fd
        self.header = header

    def head(self) -> LogHead:
        data = os.pread(self._fd, self.header.index_bytes, self.header.index_offset)
        self.raise_if_overwritten()
        return LogHead.model_validate_json(data)

    def extra(self) -> bytes:
        data = os.pread(self._fd, self.header.extra_bytes, self.header.extra_offset)
        self.raise_if_overwritten()
        return data

    def read_payload(self, memory: memoryview) -> None:
        _read(self._fd, memory, self.header.payload_offset)
        self.raise_if_overwritten()

    def raise_if_overwritten(self) -> None:
        if read_sequence(self._fd) != self.header.sequence:
            raise _Overwritten


class _State:
    """The part that is being made: views of its tensors."""

    def __init__(self, payload: Tensor, index: ShardIndex, head: LogHead) -> None:
        """`payload`: of the whole copy, uint8; it is changed."""
        self._head = head
        self._raw = {item.fqn: payload[item.file_offset : item.file_offset + item.nbytes] for item in index.items}
        self._items = {item.fqn: item for item in index.items}
        try:
            self._rule = rule_of(head, self._view, self._items)
        except KeyError as error:
            raise ReplayFailed(f"the whole copy has no {error.args[0]}") from None
        except (ValueError, TypeError) as error:
            raise ReplayFailed(f"its optimizer cannot be made here: {error}") from None
        if any(
            tuple(rule_parameter.shape) != parameter.sizes
            for rule_parameter, parameter in zip(self._rule.parameters, head.parameters, strict=True)
        ):
            raise ReplayFailed("the whole copy has other shards than the log")
        self._gradients = torch.empty(head.num_elements)

    def apply(self, entry: _Entry) -> None:
        blob = decode(entry.extra())
        commit = blob.commit
        head = self._head
        num_groups = len(head.groups) if head.optimizer is None else len(head.optimizer.groups)
        if len(commit.counts) != len(head.parameters) or len(commit.lrs) != num_groups:
            raise ReplayFailed(f"the commit of step {commit.step} does not fit its log")
        gradients = self._read(entry, commit)
        present = {number: view for number, view in enumerate(gradients) if view is not None and commit.counts[number]}
        # One after the other, and only what is not 1, as in the training step: else the bits could differ.
        for factor in (commit.unscale, commit.clip):
            if factor != 1.0 and present:
                torch._foreach_mul_(list(present.values()), factor)
        try:
            self._rule.apply(commit, present)
        except ValueError as error:
            raise ReplayFailed(f"step {commit.step} cannot be repeated: {error}") from None
        for (name, num_bytes), value in zip(commit.changed, blob.changed, strict=True):
            target = self._raw.get(name)
            if target is None or target.numel() != num_bytes:
                raise ReplayFailed(f"the commit of step {commit.step} changes {name}, which the whole copy has not")
            if num_bytes:
                target.numpy()[:] = memoryview(value)

    def _read(self, entry: _Entry, commit: Commit) -> list[Tensor | None]:
        num = entry.header.num_bytes // (2 if commit.is_bf16 else 4)
        views = views_of(self._gradients, self._head, commit.counts, commit.unused)
        if num != sum(view.numel() for view in views if view is not None):
            raise ReplayFailed(f"the gradients of step {commit.step} do not fit its commit")
        if commit.is_bf16:
            short = torch.empty(num, dtype=torch.bfloat16)
            entry.read_payload(short.view(torch.uint8).numpy().data)
            self._gradients[:num].copy_(short)
        else:
            entry.read_payload(self._gradients[:num].view(torch.uint8).numpy().data)
        return views

    def _view(self, name: str) -> Tensor:
        item = self._items[name]
        return self._raw[name].view(getattr(torch, item.dtype)).view(item.sizes)


def _open(resources: ExitStack, source: _Source) -> int:
    fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    resources.callback(os.close, fd)
    if read_header(fd) != source.header:
        raise _Overwritten
    return fd


def _payload(fd: int, header: PartHeader) -> Tensor:
    """A private copy of a part's payload, uint8."""
    payload = torch.empty(header.num_bytes, dtype=torch.uint8)
    _read(fd, payload.numpy().data, header.payload_offset)
    if read_sequence(fd) != header.sequence:
        raise _Overwritten
    return payload


def _copy(fd: int, header: PartHeader, slot: SlotFile, regions: Regions) -> None:
    memory = memoryview(slot.map)
    _read(fd, memory[regions.index_offset : regions.index_offset + header.index_bytes], header.index_offset)
    _read(fd, memory[regions.payload_offset : regions.payload_offset + header.num_bytes], header.payload_offset)
    memory.release()
    if read_sequence(fd) != header.sequence:
        raise _Overwritten


def _read(fd: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.preadv(fd, [memory], offset)
        if not count:
            raise _Overwritten
        memory, offset = memory[count:], offset + count


@dataclass(frozen=True, slots=True)
class Link:
    """One complete entry: it leads from any state with `previous` <= step < `step` to the state after `step`."""

    step: int
    previous: int


def chain(bases: Collection[int], links: Iterable[Link], wanted: int) -> tuple[int, tuple[Link, ...]] | None:
    """The newest whole copy from which the wanted step can be reached, and the entries to replay. None if none
    leads."""
    known = list(links)
    for base in sorted((base for base in bases if base <= wanted), reverse=True):
        path: list[Link] = []
        for link in _from(base, known):
            if link.step > wanted:
                break
            path.append(link)
        if (path[-1].step if path else base) == wanted:
            return base, tuple(path)
    return None


def replayable(bases: Collection[int], links: Iterable[Link]) -> set[int]:
    """Returns every step that can be reached from a whole copy by replaying at least one entry, and is none itself."""
    known = list(links)
    return {link.step for base in bases for link in _from(base, known)} - set(bases)


def _from(base: int, links: list[Link]) -> Iterator[Link]:
    """The entries that follow a state, in order."""
    step = base
    for link in sorted(links, key=lambda link: link.step):
        if link.previous <= step < link.step:
            step = link.step
            yield link


COMPARED_EVERY = 8
"""Copies of one rank: a comparison costs about as many updates as there are steps between two copies."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """The copy of a rank's state after a step differs from its replay in these tensors."""

    generation: int
    rank: int
    step: int
    names: tuple[str, ...]


class Comparison:
    """Called from any thread."""

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self._lock = threading.Lock()
        self._num_copies: Counter[tuple[int, int]] = Counter()
        self._compared: set[tuple[int, int]] = set()
        self._found: deque[Difference] = deque()

    @contextmanager
    def of_copy(self, generation: int, rank: int) -> Iterator[bool]:
        """Surrounds the receipt of a whole copy; yields whether the copy shall be compared. If so, `needs_entries` is
        true of this rank meanwhile."""
        with self._lock:
            self._num_copies[generation, rank] += 1
            is_due = self._num_copies[generation, rank] % COMPARED_EVERY == 2  # the first that follows another one
            if is_due:
                self._compared.add((generation, rank))
        try:
            yield is_due
        finally:
            with self._lock:
                self._compared.discard((generation, rank))

    def needs_entries(self, generation: int, rank: int) -> bool:
        """Returns whether entries of this rank must not be overwritten now."""
        return (generation, rank) in self._compared

    def run(self, generation: int, rank: int, step: int, check: Callable[[], None]) -> None:
        """Compares the copy, which may take long. Runs on a thread of its own, whose priority it lowers."""
        with suppress(OSError):
            # Linux takes the id of a thread here, and lowers this thread alone.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            names = self._replayer.differing(generation, rank, step, check)
        except ReplayFailed as error:
            _log.warning("snapshot_store.comparison_failed", extra={"error": str(error)})
            return
        if names:
            self._found.append(Difference(generation, rank, step, names))

    def take(self) -> Difference | None:
        """The next difference that was found; None if there is none."""
        return self._found.popleft() if self._found else None
