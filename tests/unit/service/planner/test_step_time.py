"""Seconds of a step, by hand on hardware with round numbers: 1 TFLOP/s (half of it in products), 10 GB/s inside."""

from typing import Any

import numpy as np
import pytest

from shoal_service.planner.candidates import LEVELS, RECOMPUTES, SCHEDULES, Candidates, cut
from shoal_service.planner.memory import Work
from shoal_service.planner.network import network
from shoal_service.planner.shape import shape_of
from shoal_service.planner.step_time import SecondsPart, step_time
from shoal_workers.contract.layout import Recompute, Schedule, ShardLevel
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
    schedule, racks = choices.pop("schedule", Schedule.ONE_F_ONE_B), choices.pop("racks", ())
    numbers = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "per_rank"), 1)
    numbers |= {"level": 0, "recompute": 0, "context": 0, "cut": 0, "fed": 4, **choices}
    columns: dict[str, Any] = {name: np.array([value]) for name, value in numbers.items()}
    columns["schedule"] = np.array([SCHEDULES.index(schedule)])
    pieces = cut(shape, numbers["pp"], numbers["per_rank"], is_v_shaped=schedule.is_v_shaped)
    layouts = Candidates(**columns, cuts=(pieces,))
    step_s, parts = step_time(shape, WORK, Precision.FP32, network(layouts, profile, racks), layouts)
    assert sum(parts.values()) == pytest.approx(step_s)
    return {part: float(value[0]) for part, value in parts.items()}


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
