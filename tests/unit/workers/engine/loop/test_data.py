"""Where the micro-batches of a loop come from: the order of loaders, the plan of streams, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from shoal_workers.engine.loop.data import Reader, Wanted, source_of
from shoal_workers.engine.loop.samples import LoaderOrder
from shoal_workers.engine.loop.streams import Stream, StreamPlan, StreamStates
from shoal_workers.engine.loop.tracked import decode_state, encode_state
from shoal_workers.engine.process.data_processes import DataProcesses

SAMPLES = list(range(24))


class Line(IterableDataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < len(SAMPLES):
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Forgetful(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(SAMPLES)


class Hardest(Sampler):  # type: ignore[type-arg]
    """Samples with a large loss come first."""

    def __init__(self) -> None:
        self.losses = [0.0] * len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(SAMPLES, key=lambda index: -self.losses[index]))

    def __len__(self) -> int:
        return len(SAMPLES)


class Drawn(Sampler):  # type: ignore[type-arg]
    """Gives another order each time, whatever the seed."""

    def __init__(self) -> None:
        self.own = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.own.sample(SAMPLES, len(SAMPLES)))

    def __len__(self) -> int:
        return len(SAMPLES)


def reader(rank: int = 0, world_size: int = 1, states: StreamStates | None = None) -> Reader:
    return Reader(
        rank=rank,
        world_size=world_size,
        max_workers=4,
        seed=0,
        device=torch.device("cpu"),
        check=lambda: None,
        processes=DataProcesses(),
        states=states or StreamStates(),
    )


def read(data: Any, steps: range, rank: int = 0, world_size: int = 1, **wanted: Any) -> dict[int, list[list[int]]]:
    """The micro-batches of weight 1 of a rank, by step."""
    source = source_of(data, Wanted(**{"global_size": 12, **wanted}), reader(rank, world_size), 0)
    found: dict[int, list[list[int]]] = {}
    for step in steps:
        own = [(micro, source.get(step, number)) for number, micro in enumerate(source.own)]
        found[step] = [batch.tolist() for micro, batch in own if micro.weight]
    source.close()
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(SAMPLES, batch_size=3, shuffle=True),  # type: ignore[arg-type]
        lambda: DataLoader(SAMPLES, batch_size=3, sampler=RandomSampler(SAMPLES, generator=torch.Generator())),  # type: ignore[arg-type]
        lambda: DataLoader(SAMPLES, batch_size=3),  # type: ignore[arg-type]
    ],
)
def test_a_loader_has_the_same_order_at_every_size_and_from_every_step(make: Any) -> None:
    whole = read(make(), range(6))
    for epoch in ((0, 1), (2, 3), (4, 5)):
        assert sorted(index for step in epoch for batch in whole[step] for index in batch) == SAMPLES
    torch.manual_seed(5)  # which may not matter
    for world_size in (2, 3, 4):
        ranks = [read(make(), range(3, 6), rank, world_size) for rank in range(world_size)]
        for step in range(3, 6):
            assert [batch for own in ranks for batch in own[step]] == whole[step]


def test_the_epochs_of_a_shuffled_loader_differ() -> None:
    whole = read(DataLoader(SAMPLES, batch_size=3, shuffle=True), range(4))  # type: ignore[arg-type]
    assert whole[0] + whole[1] != whole[2] + whole[3]


def test_a_sampler_that_cannot_be_repeated_is_refused() -> None:
    loader = DataLoader(SAMPLES, batch_size=3, sampler=Drawn())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Drawn gives another order each time .* Give it set_epoch\(epoch\)"):
        LoaderOrder(loader, 4, 0)


def test_an_order_that_follows_the_losses_of_a_rank_is_refused_in_the_second_epoch() -> None:
    sampler = Hardest()
    order = LoaderOrder(DataLoader(SAMPLES, batch_size=4, sampler=sampler), 2, 0)  # type: ignore[arg-type]
    assert [list(order.indices(step, 0)) for step in (0, 3)] == [[0, 1, 2, 3]] * 2
    sampler.losses[7] = 1.0
    with pytest.raises(ValueError, match="Hardest gives another order of its first epoch once samples were computed"):
        order.indices(6, 0)


@pytest.mark.parametrize(
    ("data", "wanted", "words"),
    [
        (Forgetful(), {}, r"Forgetful has no state_dict\(\) .* Give it both; or read it with torchdata"),
        (DataLoader(Forgetful(), batch_size=3), {}, "Forgetful, which this DataLoader reads, has no state_dict"),
        (DataLoader(Line(), batch_size=3, num_workers=1), {}, "Use torchdata.*StatefulDataLoader.*; or num_workers=0"),
        (DataLoader(SAMPLES, batch_size=3), {"num_workers": 2}, "num_workers=2, but a DataLoader has its own"),  # type: ignore[arg-type]
        (DataLoader(SAMPLES, batch_size=3), {"micro_size": 4}, "micro_size 4, and the loader has batch_size 3"),  # type: ignore[arg-type]
        (DataLoader(SAMPLES, batch_size=5), {}, "global_size 12 is not a multiple of the loader's batch_size 5"),  # type: ignore[arg-type]
        (DataLoader(SAMPLES, batch_size=3, sampler=DistributedSampler(SAMPLES, 2, 0)), {}, "has a DistributedSampler"),  # type: ignore[arg-type]
        (Line(), {"num_workers": 1}, "StatefulDataLoader"),
        (Line(), {"num_streams": 2}, r"Give a function of \(stream, num_streams\)"),
        (SAMPLES, {"num_streams": 2}, "num_streams=2, but list is read by index"),
        (lambda stream, num: Line(), {"micro_size": 3, "num_streams": 3}, "multiple of 9"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_way_out(data: Any, wanted: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        source_of(data, Wanted(**{"global_size": 12, **wanted}), reader(), 0)


def test_the_number_of_streams_never_changes() -> None:
    states = StreamStates()
    states.set(0, dict.fromkeys(range(2), '{"epoch": 0, "state": "[]"}'))
    with pytest.raises(ValueError, match=r"num_streams 4, and the state to go on from is that of 2 streams"):
        source_of(
            lambda stream, num: Line(), Wanted(global_size=12, micro_size=3, num_streams=4), reader(states=states), 0
        )


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 8))
def test_each_stream_is_read_by_one_rank_and_each_micro_batch_computed_once(
    num_streams: int, per_stream: int, world_size: int
) -> None:
    world_size = min(world_size, num_streams)
    plan = StreamPlan(num_streams, num_streams * per_stream, is_shared=False)
    owners = [stream for rank in range(world_size) for stream in plan.streams_of(rank, world_size)]
    assert owners == list(range(num_streams))
    own = [plan.own(rank, world_size) for rank in range(world_size)]
    assert len({len(one) for one in own}) == 1, "all ranks call the same collectives"
    computed = [micro.index for one in own for micro in one if micro.weight]
    assert computed == list(range(plan.num_micro_batches))
    for rank, one in enumerate(own):
        assert {plan.stream_of(micro.index) for micro in one if micro.weight} == {*plan.streams_of(rank, world_size)}


def test_a_stream_goes_on_over_its_end_and_from_its_state() -> None:
    stream = Stream(DataLoader(Line(), batch_size=8), 8, None)
    first = [stream.read().tolist() for _ in range(2)]
    state = stream.state()
    later = [stream.read().tolist() for _ in range(5)]
    assert first + later == [SAMPLES[0:8], SAMPLES[8:16], SAMPLES[16:24]] * 2 + [SAMPLES[0:8]]
    again = Stream(DataLoader(Line(), batch_size=8), 8, None)
    again.restore(state)
    assert [again.read().tolist() for _ in range(5)] == later


def test_an_empty_stream_is_one_sentence() -> None:
    class Empty(Line):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ValueError, match="a whole epoch of Empty has nothing to read"):
        Stream(Empty(), 2, None).read()


def test_a_state_goes_through_a_text() -> None:
    state = {
        "generator": torch.Generator().manual_seed(3).get_state(),
        "positions": [1, (2, None)],
        "mask": torch.tensor([[True, False]]),
        "scale": torch.tensor(0.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 2),
    }
    back = decode_state(encode_state(state))
    assert back["positions"] == [1, (2, None)]
    for name in ("generator", "mask", "scale", "nothing"):
        assert torch.equal(back[name], state[name]) and back[name].dtype == state[name].dtype  # type: ignore[call-overload]


class OwnGenerator(list[int]):
    """Samples with noise of a generator that nobody seeds."""

    def __init__(self) -> None:
        super().__init__(SAMPLES)
        self.generator = random.Random(1)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + self.generator.random()


class SeededNoise(list[int]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + random.random()


@pytest.mark.parametrize("data", [OwnGenerator(), SeededNoise(SAMPLES)], ids=["own generator", "seeded"])
def test_the_first_micro_batch_is_read_twice_and_nothing_else_changes(data: Any) -> None:
    seen: list[tuple[Any, Any, Any]] = []
    looking = replace(reader(), first_look=lambda *all_three: seen.append(all_three))
    source = source_of(data, Wanted(global_size=8, micro_size=4), looking, 0)
    batches = [source.get(step, number) for step in range(2) for number in range(2)]
    [(batch, again, looked_at)] = seen
    assert looked_at is data
    assert torch.equal(batch, batches[0]) and torch.equal(again, batch) == (not isinstance(data, OwnGenerator))
    if isinstance(data, SeededNoise):
        plain = source_of(data, Wanted(global_size=8, micro_size=4), reader(), 0)
        plain.get(0, 0)
        after = random.random()
        source = source_of(data, Wanted(global_size=8, micro_size=4), looking, 0)
        source.get(0, 0)
        assert random.random() == after, "the generators are where one reading leaves them"
