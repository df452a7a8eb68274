"""Products by shape, attention by length and what differs between training programs, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal_service.planner.candidates import RECOMPUTES, SCHEDULES, Candidates, cut
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.memory import BytesPart, Work, content_columns, memory, saved_by, saved_bytes
from shoal_service.planner.network import network
from shoal_service.planner.shape import shape_of
from shoal_service.planner.stack import SHOAL, AttentionKernel, Stack
from shoal_service.planner.step_time import SecondsPart, compute_s, step_time
from shoal_workers.contract.layout import Recompute, Schedule
from shoal_workers.contract.spec import Precision

MODEL: dict[str, Any] = {"dim": 4096, "num_heads": 32, "hidden_dim": 11008, "num_layers": 4, "seq_len": 4096}
H100 = PROFILES["h100"]
MOE: dict[str, Any] = {**MODEL, "num_experts": 16, "top_k": 4, "expert_hidden_dim": 2048}


def _row(shape: Any, **choices: Any) -> Candidates:
    schedule = choices.pop("schedule", Schedule.ONE_F_ONE_B)
    numbers = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "per_rank"), 1)
    numbers |= {"level": 0, "recompute": 0, "context": 0, "cut": 0, "fed": 4, **choices}
    columns: dict[str, Any] = {name: np.array([value]) for name, value in numbers.items()}
    columns["schedule"] = np.array([SCHEDULES.index(schedule)])
    return Candidates(**columns, cuts=(cut(shape, numbers["pp"], numbers["per_rank"], is_v_shaped=False),))


def _forward_s(shape: Any, profile: Any, stack: Stack = SHOAL, **choices: Any) -> float:
    row, work = _row(shape, **choices), Work(1, 4, 2, stack=stack)
    passes = compute_s(shape, work, Precision.BF16, profile, row, content_columns(row, "slowest"))
    return float(passes.forward[0])


def _parts(shape: Any, stack: Stack, **choices: Any) -> dict[SecondsPart, float]:
    row = _row(shape, **choices)
    _, parts, _ = step_time(shape, Work(1, 4, 2, stack=stack), Precision.BF16, network(row, H100), row)
    return {part: float(value[0]) for part, value in parts.items()}


@pytest.fixture
def shape(job: Any) -> Any:
    return shape_of(job(MODEL))


def test_a_product_takes_whole_waves_of_tiles(job: Any, round_numbers: Any) -> None:
    """100 multiprocessors compute 128 x 256 outputs each at a time: 4,096 x 4,096 outputs are 512 tiles, 6 waves."""
    gpu = round_numbers.model_copy(update={"multiprocessors": 100, "memory_bandwidth": 1e30})
    only_attention = {**MODEL, "hidden_dim": 1, "num_layers": 1}
    whole = _forward_s(shape_of(job(only_attention)), gpu)
    waves = 4 * 6 * 100 * 2 * 128 * 256 * 4096 / 0.5e12
    scores = 2 * 4096 * 4096 * 4096 / 0.25e12
    assert whole == pytest.approx(waves + scores, rel=0.05)


def test_attention_is_slower_for_short_sequences(job: Any) -> None:
    rates = H100.model_copy(update={"attention_rates": {1024: (1e14, 1e14), 4096: (4e14, 4e14)}})
    flat = H100.model_copy(update={"attention_rates": {1024: (4e14, 4e14)}})
    for length, is_slower in ((1024, True), (2048, True), (4096, False), (65536, False)):
        shape = shape_of(job({**MODEL, "seq_len": length}))
        assert (_forward_s(shape, rates) > 1.0001 * _forward_s(shape, flat)) is is_slower, length


def test_the_slowest_of_many_devices_sets_the_pace(shape: Any) -> None:
    times = [_forward_s(shape, H100, dp_replicate=size) for size in (1, 8, 512, 16_384)]
    assert times == sorted(times) and times[0] == _forward_s(shape, H100.model_copy(update={"spread": 0.0}))
    assert times[2] / times[1] == pytest.approx(1 + H100.spread * (3.04 - 1.42), rel=0.01)


def test_only_the_devices_of_the_last_stage_count_if_it_is_the_slowest(shape: Any) -> None:
    equal = H100.model_copy(update={"spread": 0.0})
    ratios = [
        _forward_s(shape, H100, **row) / _forward_s(shape, equal, **row)
        for row in ({"dp_shard": 64}, {"dp_shard": 64, "pp": 4})
    ]
    assert ratios[0] == pytest.approx(ratios[1]) and ratios[0] > 1.04


def test_kernels_of_attention_differ(shape: Any) -> None:
    kernels = (AttentionKernel.CUDNN, AttentionKernel.FLASH_2, AttentionKernel.FLASH_1, AttentionKernel.UNFUSED)
    times = [_forward_s(shape, H100, Stack(attention=kernel)) for kernel in kernels]
    assert times == sorted(times) and len(set(times)) == 4


def test_fp8_products_are_faster_but_pay_for_their_casts(job: Any) -> None:
    """pytorch/ao measures 1.39 for a product of 4,096 x 8,192 x 16,384 with its gradients on an H100."""
    large = shape_of(job({**MODEL, "dim": 8192, "hidden_dim": 28672, "num_layers": 1}))
    bf16, fp8 = (_parts(large, Stack(fp8=fp8))[SecondsPart.COMPUTE] for fp8 in (False, True))
    assert 1.2 < bf16 / fp8 < H100.fp8_speed


def test_what_tp_hides_and_gathers_again(shape: Any) -> None:
    plain, hidden, again = (
        _parts(shape, stack, tp=8)[SecondsPart.TP]
        for stack in (SHOAL, Stack(hides_tensor=True), Stack(gathers_again=True))
    )
    ends = 4
    assert (again - plain) / plain == pytest.approx(4 * 2 / (4 * 8 + ends))
    assert (plain - hidden) / plain == pytest.approx(4 * 2 * H100.overlap / (4 * 8 + ends))


def test_a_copy_for_each_node_saves_part_of_the_exchange(job: Any) -> None:
    moe = shape_of(job(MOE))
    copies, once = (
        _parts(moe, Stack(dispatches_once=once), dp_shard=16, ep=16, fed=1)[SecondsPart.EP] for once in (False, True)
    )
    reached = 2 * (1 - 0.5**4) / 4  # of 2 nodes, 4 copies reach 1.875
    assert once / copies == pytest.approx(reached, rel=0.05)


def test_experts_over_tp_ranks_are_whole_and_get_the_tokens_of_one_rank(job: Any) -> None:
    """tp 8: ep 8 over data ranks sends every token from each tp rank, ep 8 over the tp ranks only those of the rank."""
    moe = shape_of(job(MOE))
    shards, replicas = {"dp_shard": 8}, {"dp_replicate": 8}
    apart, folded = (_parts(moe, SHOAL, tp=8, ep=8, **data) for data in (shards, replicas))
    assert folded[SecondsPart.EP] < apart[SecondsPart.EP] / 8, "also inside a node"
    ends = 4
    assert folded[SecondsPart.TP] / apart[SecondsPart.TP] == pytest.approx((4 * 8 / 2 + ends) / (4 * 8 + ends))
    assert folded[SecondsPart.COMPUTE] < apart[SecondsPart.COMPUTE], "wider products"
    shared = shape_of(job({**MOE, "num_shared_experts": 1}))
    both = [_parts(shared, SHOAL, tp=8, ep=8, **data)[SecondsPart.TP] for data in (shards, replicas)]
    assert both[0] == both[1], "tp splits the shared expert"


def test_a_window_costs_its_tiles_or_with_a_mask_all_scores(shape: Any) -> None:
    windowed = replace(shape, window=128, windowed=0.5)
    free = H100.model_copy(update={"attention_rates": {}})
    products = _forward_s(shape, free.model_copy(update={"attention_efficiency": 1e9}))
    whole, skipped, masked = (
        _forward_s(of, free, Stack(skips_masked=skips)) - products
        for of, skips in ((shape, False), (windowed, True), (windowed, False))
    )
    assert skipped / whole == pytest.approx(0.5 + 0.5 * 2 * (128 + 128) / 4096, rel=1e-3)
    assert masked / whole == pytest.approx(0.5 + 0.5 * 2, rel=1e-3)
    in_cudnn = [_forward_s(of, H100, Stack(skips_masked=True)) for of in (shape, windowed)]
    assert in_cudnn[1] < in_cudnn[0]


def test_a_router_in_order_sends_a_token_to_neighbours_and_loads_all_experts_equally(job: Any) -> None:
    moe = shape_of(job(MOE))
    once, in_order = (
        _parts(moe, Stack(dispatches_once=True, routes_in_order=value), dp_shard=16, ep=16, fed=1)
        for value in (False, True)
    )
    # of 2 nodes 1.875 are reached at random, and one by 4 neighbours of 16 experts on 16 ranks
    assert in_order[SecondsPart.EP] / once[SecondsPart.EP] == pytest.approx(1 / 1.875, rel=0.06)
    assert in_order[SecondsPart.COMPUTE] < once[SecondsPart.COMPUTE]


def test_gradients_are_added_in_each_micro_batch_unless_the_product_does_it(shape: Any) -> None:
    apart, fused = (_parts(shape, Stack(sums_in_product=fused), dp_shard=4)[SecondsPart.DP] for fused in (False, True))
    assert apart - fused == pytest.approx(10 * shape.params / H100.memory_bandwidth, rel=1e-4)
    halves = _parts(shape, Stack(summed_gradient_bytes=2), dp_shard=4)[SecondsPart.DP]
    assert halves - fused == pytest.approx(6 * shape.params / H100.memory_bandwidth, rel=1e-4)


def test_a_host_that_every_kernel_waits_for_costs_its_time_in_each_block(shape: Any) -> None:
    apart, waiting = (_parts(shape, Stack(launch_s=launch_s))[SecondsPart.COMPUTE] for launch_s in (0.0, 2e-3))
    assert waiting - apart == pytest.approx(4 * 4 * 2e-3)  # micro-batches, blocks


def test_keys_that_are_repeated_before_cp_are_sent_as_often(job: Any) -> None:
    grouped = shape_of(job({**MODEL, "num_kv_heads": 4}))
    free = H100.model_copy(update={"inside": H100.inside.model_copy(update={"latency_s": {2: 0.0}})})
    row = _row(grouped, cp=4)
    seconds = [
        step_time(grouped, Work(1, 4, 2, stack=Stack(repeats_keys=repeats)), Precision.BF16, network(row, free), row)
        for repeats in (False, True)
    ]
    shared, repeated = (float(parts[SecondsPart.CP][0]) for _, parts, _ in seconds)
    assert repeated == pytest.approx(8 * shared)


def test_gathers_between_nodes_take_a_hop_to_each_rank() -> None:
    """NVIDIA/nccl, src/graph/tuning.cc: 14 us, 4 for each node and 1.9 for each other rank."""
    latencies = [H100.between.latency(size) for size in (64, 512, 1024)]
    assert latencies == pytest.approx([14e-6 + nodes * (4e-6 + 7 * 1.9e-6) for nodes in (8, 64, 128)])


def test_messages_that_a_stage_waits_for_cost_their_whole_time(shape: Any) -> None:
    hidden, waits = (
        _parts(shape, Stack(message_waits=waits), pp=2, dp_shard=1)[SecondsPart.PP] for waits in (None, 2.0)
    )
    assert hidden / waits == pytest.approx(1 - H100.overlap)


def test_scores_are_kept_or_computed_again(shape: Any) -> None:
    kept, again = (Stack(attention=AttentionKernel.UNFUSED, keeps_scores=value) for value in (True, False))
    assert _parts(shape, kept)[SecondsPart.RECOMPUTE] == 0 < _parts(shape, again)[SecondsPart.RECOMPUTE]
    for recompute, number in ((0, 4), (RECOMPUTES.index(Recompute.FULL), 0)):
        row = _row(shape, recompute=recompute)
        sizes = [memory(shape, Work(1, 4, 2, stack=stack), H100, row)[1] for stack in (kept, again)]
        more = float(sizes[0][BytesPart.ACTIVATIONS][0] - sizes[1][BytesPart.ACTIVATIONS][0])
        assert more == pytest.approx(number * 5 * 32 * 4096 * 4096)  # blocks, bytes, heads, queries, keys


def test_memory_of_a_stack(shape: Any) -> None:
    def bytes_of_block(stack: Stack) -> float:
        return float(saved_bytes(saved_by(shape.dense, Recompute.NONE, stack), np.array([8]), 2, stack)[0])

    def parts(stack: Stack, **choices: Any) -> dict[BytesPart, float]:
        _, sizes = memory(shape, Work(1, 4, 2, stack=stack), H100, _row(shape, tp=8, **choices))
        return {part: float(size[0]) for part, size in sizes.items()}

    usual = parts(SHOAL)
    tokens, blocks = 4096, 4
    again = parts(Stack(gathers_again=True))[BytesPart.ACTIVATIONS]
    assert usual[BytesPart.ACTIVATIONS] - again == pytest.approx(tokens * blocks * 2 * 4096 * 2 * 7 / 8)
    fused = parts(Stack(widths_saved=3))[BytesPart.ACTIVATIONS]
    assert usual[BytesPart.ACTIVATIONS] - fused == pytest.approx(tokens * blocks * 11008 * 2 / 8)
    full = RECOMPUTES.index(Recompute.FULL)
    whole = parts(Stack(is_sequence_parallel=False), recompute=full)[BytesPart.ACTIVATIONS]
    assert whole > parts(SHOAL, recompute=full)[BytesPart.ACTIVATIONS] + tokens * blocks * 4096 * 2 * 7 / 8
    two_stages = {"recompute": full, "pp": 2}
    ends = [
        parts(Stack(is_sequence_parallel=is_split), **two_stages)[BytesPart.ACTIVATIONS] for is_split in (False, True)
    ]
    inputs = 2 * 3 * tokens * 4096 * 2 * 7 / 8  # micro-batches in flight; of two blocks and the embedding
    again = tokens * (bytes_of_block(Stack(is_sequence_parallel=False)) - bytes_of_block(SHOAL))
    assert ends[0] - ends[1] == pytest.approx(inputs + again)
    in_one_piece = parts(Stack(update_bytes=6))[BytesPart.OPTIMIZER] - usual[BytesPart.OPTIMIZER]
    assert in_one_piece == pytest.approx(6 / 4 * usual[BytesPart.PARAMETERS])
    half = parts(Stack(moment_bytes=2, updates_in_place=True))
    assert half[BytesPart.OPTIMIZER] == usual[BytesPart.OPTIMIZER] / 2
    assert parts(Stack(parameter_bytes=2))[BytesPart.PARAMETERS] == usual[BytesPart.PARAMETERS] / 2


def test_data_ranks_that_are_next_to_each_other_share_the_cards_of_a_node(shape: Any) -> None:
    """On nodes of 8, with 2 pipeline and 8 data ranks, those of a pipeline are neighbours, or those of the data."""
    pipeline_last = ("cp", "ep", "dp_shard", "dp_replicate", "pp")
    row = _row(shape, pp=2, dp_shard=8)
    inside, last = (network(row, H100, (), order).spans for order in (SHOAL.locality, pipeline_last))
    assert (int(inside.shards.per_node[0]), int(last.shards.per_node[0])) == (4, 8)
    assert (int(inside.of_axis["pp"].link[0]), int(last.of_axis["pp"].link[0])) == (0, 1)


def test_without_sequence_parallelism_every_tp_rank_repeats_the_norms(shape: Any) -> None:
    equal = H100.model_copy(update={"spread": 0.0})
    apart, repeated = (_forward_s(shape, equal, Stack(is_sequence_parallel=value), tp=8) for value in (True, False))
    norms = 4096 * 4 * shape.dense.saved.split_fp32 * 4 * 7 / 8  # tokens, blocks; 7 of 8 ranks are too many
    assert repeated - apart == pytest.approx(1.5 * norms / H100.memory_bandwidth, rel=0.02)
