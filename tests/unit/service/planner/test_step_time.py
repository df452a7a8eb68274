"""Seconds of a step, by hand on hardware with round numbers: 1 TFLOP/s (half of it in products), 10 GB/s inside."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal_service.core.hardware_profile import Link
from shoal_service.planner.candidates import CONTEXTS, LEVELS, RECOMPUTES, SCHEDULES, Candidates, cut, cut_at
from shoal_service.planner.memory import ContentColumns, Work
from shoal_service.planner.network import network
from shoal_service.planner.shape import shape_of
from shoal_service.planner.step_time import SecondsPart, compute_s, step_time
from shoal_workers.contract.layout import ContextMethod, Recompute, Schedule, ShardLevel
from shoal_workers.contract.spec import Precision

MODEL: dict[str, Any] = {
    "dim": 512,
    "num_heads": 8,
    "hidden_dim": 2048,
    "num_layers": 4,
    "seq_len": 1024,
    "vocab_size": 1000,
}
WORK = Work(micro_size=2, num_micro_batches=4, compute_bytes=4)
TOKENS = 2 * 1024
PARAMS = 4 * (4 * 512**2 + 3 * 512 * 2048)


@pytest.fixture
def shape(job: Any) -> Any:
    return shape_of(job(MODEL))


@pytest.fixture
def fast_memory(round_numbers: Any) -> Any:
    """Element-wise work takes no time, so that the rest can be counted by hand."""
    return round_numbers.model_copy(update={"memory_bandwidth": 1e30})


def _parts(shape: Any, profile: Any, **choices: Any) -> dict[SecondsPart, float]:
    return _predict(shape, profile, **choices)[0]


def _predict(shape: Any, profile: Any, **choices: Any) -> tuple[dict[SecondsPart, float], dict[SecondsPart, float]]:
    """The parts of a step, and what is hidden."""
    schedule, racks = choices.pop("schedule", Schedule.ONE_F_ONE_B), choices.pop("racks", ())
    reduction = choices.pop("reduction", Precision.FP32)
    numbers = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "per_rank"), 1)
    numbers |= {"level": 0, "recompute": 0, "context": 0, "cut": 0, "fed": 4, **choices}
    columns: dict[str, Any] = {name: np.array([value]) for name, value in numbers.items()}
    columns["schedule"] = np.array([SCHEDULES.index(schedule)])
    pieces = cut(shape, numbers["pp"], numbers["per_rank"], is_v_shaped=schedule.is_v_shaped)
    layouts = Candidates(**columns, cuts=(pieces,))
    work = replace(WORK, reduction=reduction)
    step_s, *predicted = step_time(shape, work, Precision.FP32, network(layouts, profile, racks), layouts)
    assert sum(predicted[0].values()) == pytest.approx(step_s)
    parts, hidden = ({part: float(value[0]) for part, value in columns.items()} for columns in predicted)
    return parts, hidden


def test_arithmetic_by_hand(shape: Any, fast_memory: Any) -> None:
    parts = _parts(shape, fast_memory)
    products = 3 * 2 * TOKENS * (PARAMS + 1000 * 512) / 0.5e12
    attention = 3.5 * TOKENS * 4 * (2 * 1024 * 512) / 0.25e12
    assert parts[SecondsPart.COMPUTE] == pytest.approx(4 * (products + attention))
    assert sum(parts.values()) == pytest.approx(parts[SecondsPart.COMPUTE])


def test_zero_1_gathers_and_reduces_once(shape: Any, fast_memory: Any) -> None:
    parts = _parts(shape, fast_memory, dp_shard=4, fed=1)
    whole = 4 * (PARAMS + 4 * 2 * 512 + 1000 * 512)
    assert parts[SecondsPart.DP] == pytest.approx(2 * 0.75 * whole / 1e10)


@pytest.mark.parametrize(("reduction", "sent_bytes"), [("fp32", 4), ("bf16", 2), ("int8", 1 + 4 / 128)])
def test_a_short_reduction_sends_fewer_bytes(shape: Any, fast_memory: Any, reduction: Any, sent_bytes: float) -> None:
    """Plain replicas send a gradient twice. Shards send it once and gather parameters in fp32. Of replicas of shards
    only one of the two rounds to 8 bits: the replicas if they reduce once in a step."""
    numbers = PARAMS + 4 * 2 * 512 + 1000 * 512
    reduction = reduction if reduction == "int8" else Precision(reduction)

    def seconds(**choices: Any) -> float:
        return _parts(shape, fast_memory, fed=1, reduction=reduction, **choices)[SecondsPart.DP]

    plain = seconds(dp_replicate=4, level=LEVELS.index(ShardLevel.NONE))
    assert plain == pytest.approx(2 * 0.75 * numbers * sent_bytes / 1e10)
    assert seconds(dp_shard=4) == pytest.approx(0.75 * numbers * (4 + sent_bytes) / 1e10)
    within = 4 if reduction == "int8" else sent_bytes
    once = 0.5 * numbers * (4 + within) + 2 * 0.5 * numbers / 2 * sent_bytes
    assert seconds(dp_replicate=2, dp_shard=2) == pytest.approx(once / 1e10)
    each = 0.5 * numbers * (4 + sent_bytes) + 2 * 0.5 * numbers / 2 * within
    gradients = seconds(dp_replicate=2, dp_shard=2, level=LEVELS.index(ShardLevel.GRADIENTS))
    assert gradients == pytest.approx(each / 1e10, rel=2e-3), "one micro-batch on each of four ranks"


def test_rounding_takes_memory_bandwidth(shape: Any, round_numbers: Any, fast_memory: Any) -> None:
    """0.1 TB/s; 80 bytes for each gradient. Replicas of one shard round at each level."""
    numbers, gradients = PARAMS + 4 * 2 * 512 + 1000 * 512, LEVELS.index(ShardLevel.GRADIENTS)
    for layout in ({"dp_shard": 4}, {"dp_replicate": 4, "level": gradients}):
        slow, fast = (
            _parts(shape, profile, **layout, fed=1, reduction="int8") for profile in (round_numbers, fast_memory)
        )
        assert slow[SecondsPart.DP] - fast[SecondsPart.DP] == pytest.approx(80 * numbers / 1e11)


def test_zero_2_and_3_talk_in_every_micro_batch(shape: Any, fast_memory: Any) -> None:
    once = _parts(shape, fast_memory, dp_shard=4, fed=1)[SecondsPart.DP] / 2
    two, three = (
        _parts(shape, fast_memory, dp_shard=2, fed=2, level=LEVELS.index(level))[SecondsPart.DP]
        for level in (ShardLevel.GRADIENTS, ShardLevel.FULL)
    )
    once_of_two = once * 0.5 / 0.75
    assert two == pytest.approx(once_of_two + 2 * once_of_two)
    assert three == pytest.approx(2 * 3 * once_of_two)


def test_tensor_parallelism_gathers_and_reduces_in_every_layer(shape: Any, fast_memory: Any) -> None:
    parts = _parts(shape, fast_memory, tp=2)
    hidden = TOKENS * 512 * 4
    assert parts[SecondsPart.TP] == pytest.approx(4 * (4 * 8 + 4) * 0.5 * hidden / 1e10)


def test_tensor_parallelism_pays_for_the_links_that_it_crosses(shape: Any, fast_memory: Any) -> None:
    """10 GB/s inside nodes, 1 GB/s and 1 ms between them, 0.5 GB/s and 1 ms between racks."""
    hidden, times = TOKENS * 512 * 4, 4 * (4 * 8 + 4)
    by_racks = {
        ((2,),): 0.5 * hidden / 1e10,
        ((1, 1),): 0.5 * hidden / 1e9 + 1e-3,
        ((1,), (1,)): 0.5 * hidden / 0.5e9 + 1e-3,
    }
    for racks, one in by_racks.items():
        parts = _parts(shape, fast_memory, tp=2, racks=racks)
        assert parts[SecondsPart.TP] == pytest.approx(times * one)


def test_sums_of_tp_are_read_after_their_exchange_and_samples_put_in_order(
    shape: Any, round_numbers: Any, fast_memory: Any
) -> None:
    """0.1 TB/s, two samples in a micro-batch."""
    slow, fast = (_parts(shape, profile, tp=2)[SecondsPart.TP] for profile in (round_numbers, fast_memory))
    assert slow - fast == pytest.approx(4 * (4 * 8 + 4) * 2.5 * TOKENS * 512 * 4 / 1e11)


def test_ranks_that_share_a_key_head_gather_all_queries_keys_and_values(job: Any, fast_memory: Any) -> None:
    few: Any = shape_of(job({**MODEL, "num_kv_heads": 2}))
    hidden, heads = TOKENS * 512 * 4, TOKENS * (8 + 2 * 2) * 64 * 4
    alone = _parts(few, fast_memory, tp=2)
    assert alone[SecondsPart.TP] == pytest.approx(4 * (4 * 8 + 4) * 0.5 * hidden / 1e10)
    shared = _parts(few, fast_memory, tp=4)
    by_hand = 4 * 0.75 * ((4 * 8 + 4) * hidden + 4 * 2 * heads) / 1e10
    assert shared[SecondsPart.TP] == pytest.approx(by_hand)


@pytest.mark.parametrize(("method", "copies"), [(ContextMethod.ALL_GATHER, 8), (ContextMethod.ULYSSES, 6)])
def test_what_cp_gathers_or_exchanges_is_copied_in_memory(
    shape: Any, round_numbers: Any, fast_memory: Any, method: ContextMethod, copies: int
) -> None:
    """0.1 TB/s. Keys and values of all tokens are gathered; queries, keys, values and results of own ones exchanged."""
    context = CONTEXTS.index(method)
    slow, fast = (
        _parts(shape, profile, cp=2, context=context)[SecondsPart.CP] for profile in (round_numbers, fast_memory)
    )
    sent = 4 * TOKENS * 2 * 512  # of all ranks' keys and values, or of half of the tokens' queries and results, too
    assert slow - fast == pytest.approx(4 * 4 * 2 * copies * sent / 1e11)


def test_an_uneven_partition_has_padding(shape: Any, fast_memory: Any) -> None:
    parts = _parts(shape, fast_memory, dp_shard=3, fed=2)
    assert parts[SecondsPart.PADDING] == pytest.approx(parts[SecondsPart.COMPUTE] / 4 * 3 * (2 - 4 / 3))


TWO_BLOCKS = PARAMS + 2 * 2 * 1024 * 512
"""Operations of a token: 2 for each parameter of a matrix product, and the causal half of attention."""
FIRST_OF_TWO = TWO_BLOCKS / (TWO_BLOCKS + 2 * 512 * 1000)
"""Arithmetic of the first of two stages, relative to the second, which has the head."""


def test_the_bubble_is_a_micro_batch_on_the_other_ranks_and_less_when_interleaved(shape: Any, fast_memory: Any) -> None:
    plain = _parts(shape, fast_memory, pp=2)
    one = FIRST_OF_TWO * sum(plain[p] for p in (SecondsPart.COMPUTE, SecondsPart.PP)) / 4
    assert plain[SecondsPart.BUBBLE] == pytest.approx(one)
    interleaved = _parts(shape, fast_memory, pp=2, per_rank=2, schedule=Schedule.INTERLEAVED)
    assert interleaved[SecondsPart.BUBBLE] < 0.6 * plain[SecondsPart.BUBBLE]
    v = _parts(shape, fast_memory, pp=2, per_rank=2, schedule=Schedule.ZERO_BUBBLE_V)
    assert v[SecondsPart.BUBBLE] < 0.2 * plain[SecondsPart.BUBBLE]


@pytest.mark.parametrize(("pp", "fed"), [(2, 4), (4, 8), (4, 32), (8, 16), (8, 64)])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_the_bubble_of_1f1b_is_that_of_a_timeline_of_all_passes(
    job: Any, round_numbers: Any, pp: int, fed: int, recompute: Recompute
) -> None:
    """The head makes the last stage slower than the others. The formula counts operations, so that attention, whose
    backward pass takes 2.5 times its forward pass, leaves a small difference."""
    shape: Any = shape_of(job({**MODEL, "num_layers": 24, "vocab_size": 16_000}))
    numbers = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "ep", "per_rank"), 1)
    numbers |= {"pp": pp, "level": 0, "recompute": RECOMPUTES.index(recompute), "context": 0, "cut": 0, "fed": fed}
    columns: dict[str, Any] = {name: np.array([value]) for name, value in numbers.items()}
    pieces = cut_at(shape, (24 // pp,) * pp, pp)
    columns["schedule"] = np.array([SCHEDULES.index(Schedule.ONE_F_ONE_B)])
    layouts = Candidates(**columns, cuts=(pieces,))
    free = round_numbers.model_copy(update={"memory_bandwidth": 1e30, "overlap": 1.0})
    work = replace(WORK, num_micro_batches=fed)
    _, parts, _ = step_time(shape, work, Precision.FP32, network(layouts, free), layouts)
    formula = sum(float(parts[name][0]) for name in (SecondsPart.COMPUTE, SecondsPart.RECOMPUTE, SecondsPart.BUBBLE))
    times = []
    for rank in range(pp):
        ends = int(rank == 0), int(rank == pp - 1)
        content = ContentColumns(*(np.array([number]) for number in (rank, 24 // pp, 0, *ends)))
        passes = compute_s(shape, work, Precision.FP32, free, layouts, content)
        times.append((float(passes.forward[0]), float(passes.backward[0] + passes.recompute[0])))
    assert formula == pytest.approx(_timeline_1f1b(times, fed), rel=0.015)


def _timeline_1f1b(times: list[tuple[float, float]], fed: int) -> float:
    """The end of the last pass. Each rank runs its passes in the order of 1F1B, each when its input is there. `times`:
    seconds of a forward and a backward pass of each rank."""
    ends: dict[tuple[int, int, int], float] = {}
    pending, clocks = {}, [0.0] * len(times)
    for rank in range(len(times)):
        ahead = min(len(times) - 1 - rank, fed)
        order = [(0, number) for number in range(ahead)]
        for number in range(fed):
            order += [(0, number + ahead)] * (number + ahead < fed) + [(1, number)]
        pending[rank] = order
    while any(pending.values()):
        for rank, order in pending.items():
            while order:
                direction, number = order[0]
                source = rank - 1 if direction == 0 else rank + 1
                key = (direction, source, number)
                if 0 <= source < len(times) and key not in ends:
                    break
                clocks[rank] = max(clocks[rank], ends.get(key, 0.0)) + times[rank][direction]
                ends[direction, rank, number] = clocks[rank]
                order.pop(0)
    return max(clocks)


@pytest.mark.parametrize("schedule", [Schedule.ZERO_BUBBLE_V, Schedule.DUAL_PIPE_V])
def test_with_recomputation_no_schedule_fills_the_bubble(shape: Any, fast_memory: Any, schedule: Schedule) -> None:
    recompute = RECOMPUTES.index(Recompute.FULL)
    parts = _parts(shape, fast_memory, pp=2, per_rank=2, schedule=schedule, recompute=recompute)
    one = sum(parts[p] for p in (SecondsPart.COMPUTE, SecondsPart.RECOMPUTE, SecondsPart.PP)) / 4
    assert 0.8 * one / 2 < parts[SecondsPart.BUBBLE] <= one / 2


def test_ranks_that_share_processors_are_slower(shape: Any, fast_memory: Any) -> None:
    shared = fast_memory.model_copy(update={"processors_per_node": 2})
    alone = _parts(shape, fast_memory, dp_shard=4, fed=1)[SecondsPart.COMPUTE]
    assert _parts(shape, shared, dp_shard=4, fed=1)[SecondsPart.COMPUTE] == pytest.approx(2 * alone)


def test_communication_hides_behind_computation_only(shape: Any, fast_memory: Any) -> None:
    hiding = fast_memory.model_copy(update={"overlap": 1.0})
    seen = _parts(shape, fast_memory, dp_shard=4, fed=1)[SecondsPart.DP]
    compute = _parts(shape, fast_memory, dp_shard=4, fed=1)[SecondsPart.COMPUTE]
    hidden = _parts(shape, hiding, dp_shard=4, fed=1)[SecondsPart.DP]
    assert hidden == pytest.approx(max(0.0, seen - compute))


def test_the_first_and_the_last_stage_have_one_neighbour(job: Any, fast_memory: Any) -> None:
    """A rank sends one message to each neighbour for each micro-batch, and waits for both."""
    slow = fast_memory.model_copy(update={"inside": Link(bandwidth=1e9, latency_s={1: 0.0})})
    message_s = TOKENS * 512 * 4 / 1e9
    large_head, small_head = (shape_of(job({**MODEL, "vocab_size": size})) for size in (10_000, 257))
    assert _parts(large_head, slow, pp=4)[SecondsPart.PP] == pytest.approx(4 * message_s)
    assert _parts(small_head, slow, pp=4)[SecondsPart.PP] == pytest.approx(4 * 2 * message_s)
    assert _parts(small_head, slow, pp=2)[SecondsPart.PP] == pytest.approx(4 * message_s)


@pytest.mark.parametrize("reduction", ["fp32", "int8"])
def test_the_ranks_of_a_tied_table_sum_its_gradient(job: Any, fast_memory: Any, reduction: Any) -> None:
    """In fp32 also if data ranks send less."""
    tied, apart = (shape_of(job({**MODEL, "tied_head": is_tied})) for is_tied in (True, False))
    seconds = [_parts(shape, fast_memory, pp=2, reduction=reduction)[SecondsPart.DP] for shape in (tied, apart)]
    assert seconds[0] - seconds[1] == pytest.approx(1000 * 512 * 4 / 1e10)


def test_what_is_hidden_is_counted_by_axis(shape: Any, fast_memory: Any) -> None:
    half = fast_memory.model_copy(update={"overlap": 0.5})
    for axis, degrees in ((SecondsPart.PP, {"pp": 2}), (SecondsPart.DP, {"dp_shard": 4, "fed": 1})):
        parts, hidden = _predict(shape, half, **degrees)
        whole = _parts(shape, fast_memory, **degrees)[axis]
        assert hidden[axis] == pytest.approx(0.5 * whole) and parts[axis] == pytest.approx(0.5 * whole)
    assert _predict(shape, fast_memory, pp=2, dp_shard=2)[1] == {SecondsPart.PP: 0, SecondsPart.DP: 0}
