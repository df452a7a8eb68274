"""Predictions of the planner beside 91 published training runs.

    python bench/published_runs.py [--group bloom] [--parts] [--no-ranks] [--page docs/planner.md]

published_runs.json has the shape, GPUs, layout, micro-batch, speed and memory of each run, with its source. No constant
of the planner may be fitted to these rows. For every row the table has the published and the predicted speed and
memory. Below it: medians by group, the share within 20 %, the place of the published degrees in the planner's own list,
the order within Bloom's layouts of one model (Spearman), and what a correction by the other sources would reach
(leave one source out), with the coverage of its error bar. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal_service.core.hardware_profile import GIB, DeviceKind, HardwareProfile
from shoal_service.planner.candidates import (
    CONTEXTS,
    LEVELS,
    RECOMPUTES,
    SCHEDULES,
    Candidates,
    Cut,
    Ints,
    cut,
    cut_at,
    fed_micro_batches,
)
from shoal_service.planner.correction import Observation, estimate_correction
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.ranking import LayoutTable, Task, predict_columns, predict_layouts, select_layouts
from shoal_service.planner.shape import ModelShape, Product, shape_of
from shoal_service.planner.stack import AttentionKernel, Stack
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import HF_TASK
from shoal_workers.contract.layout import AXES, ContextMethod, Recompute, Schedule, ShardLevel

_ROWS = Path(__file__).with_name("published_runs.json")
_BEGIN, _END = "<!-- published: made by bench/published_runs.py --page -->", "<!-- end -->"
_NEAR = 0.2
_SWEPT = 128
"""MosaicML's runs on so many GPUs were made later, by sweep.py."""
_BEST_SHARE = 0.1
_POWER_SHARE = (500 / 700) ** 0.5
"""Rate of torchtitan's H100s, which are limited to 500 of 700 W, and whose memory has 2.4 TB/s: a judgement."""
_PIPELINE_LAST = ("cp", "ep", "dp_shard", "dp_replicate", "pp")
"""Ranks of Megatron, DeepSpeed and torchtitan: those of a pipeline are the farthest apart."""
_TORCH = Stack(
    locality=_PIPELINE_LAST,
    norm_input_bytes=2,
    selective_share=0.5,
    sums_after_exchange=False,
    repeats_keys=True,
    logit_bytes=10,
)
"""Selective recomputation of torchtitan keeps attention and every second matrix product. Its models repeat keys and
values (models/llama/model.py, `repeat_kv`) before the attention that cp replaces. Its loss is never compiled
("compiling loss function causes CUDA errors, turning off for now"), and frees the logits in half precision (train.py,
`del pred`) before its three tensors in fp32."""
_COMPILED: dict[str, Any] = {"elementwise": 0.7, "logit_bytes": 8}
"""A compiler fuses element-wise operations (a judgement), and the two gradients of the loss in fp32."""
_MEGATRON = Stack(
    locality=_PIPELINE_LAST,
    attention=AttentionKernel.UNFUSED,
    keeps_scores=True,
    norm_input_bytes=2,
    widths_saved=3,
    is_sequence_parallel=False,
    sums_after_exchange=False,
    logit_bytes=6,
    elementwise=0.7,
    gradient_bytes=2,
    summed_gradient_bytes=2,
    hides_data=False,
    message_waits=2,
    updates_in_place=True,
)
"""Fused kernels, logits in fp32 that the loss overwrites, gradients in half precision, reduced after the last one."""
_DEEPSPEED = replace(_MEGATRON, message_waits=4, reduces_whole=True, update_bytes=6)
"""Messages are sent and received one after the other (deepspeed, runtime/pipe/engine.py). ZeRO-1 sums gradients in half
precision by all-reduces: without contiguous gradients, which runtime/engine.py turns off in stage 1,
runtime/zero/stage_1_and_2.py reduces whole buckets; its `step` flattens the gradients of the rank's partition, in half
precision and in fp32."""
_DEEPSPEED_BF16 = replace(_DEEPSPEED, gradient_bytes=4, summed_gradient_bytes=6, update_bytes=0)
"""The first BF16 optimizer: gradients are also summed in fp32 (runtime/bf16_optimizer.py); "the additional memory usage
is 4bytes x params and it's not sharded across gpus" (Bloom's chronicle, 02-28)."""
_LAUNCH_S = 3.5e-3
"""Bloom's runs had CUDA_LAUNCH_BLOCKING=1 (train/tr11-176B-ml/tr11-176B-ml.slurm): kernels wait for the host. Its
chronicle has 91.04 TFLOP/s with it and 97.20 without, on 80 GPUs with 8 blocks a stage and 512 micro-batches of 1: 28
ms a micro-batch. On 160 GPUs 90.29, and 96.19 two days before without it: as much."""
_MOSAIC = Stack(
    attention=AttentionKernel.FLASH_1, norm_input_bytes=2, widths_saved=3, logit_bytes=2, updates_in_place=True
)
"""llm-foundry: the loss of flash-attention, which overwrites the logits; an optimizer that updates one at a time."""
_AUTOMODEL = replace(
    _TORCH,
    repeats_keys=False,
    attention=AttentionKernel.CUDNN,
    parameter_bytes=4,
    moment_bytes=2,
    held_gradient_bytes=2,
    updates_in_place=True,
    skips_masked=True,
    **_COMPILED,
)
"""Transformer Engine's fused AdamW: parameters in bf16 with their remainders, moments in bf16."""
_STACKS = {
    "torchtitan": _TORCH,
    "mosaicml": _MOSAIC,
    "fms-fsdp": replace(_TORCH, gradient_bytes=2, **_COMPILED),
    "megatron-2021": _MEGATRON,
    "korthikanti-2022": replace(
        _MEGATRON,
        keeps_scores=False,
        is_sequence_parallel=True,
        gathers_again=True,
        hides_tensor=True,
        sums_in_product=True,
    ),
    "mt-nlg": replace(_DEEPSPEED, gradient_bytes=4, summed_gradient_bytes=4, update_bytes=0),
    "bloom": replace(_DEEPSPEED, launch_s=_LAUNCH_S),
    "llama3-paper": replace(
        _TORCH,
        repeats_keys=False,
        attention=AttentionKernel.CUDNN,
        widths_saved=3,
        gathers_again=True,
        hides_tensor=True,
        shards_in_pipeline=True,
        **_COMPILED,
    ),
    # examples/llm_benchmark: `fake_balanced_gate: true` (FakeBalancedGate of components/moe/layers.py), no `compile`
    "moe-bf16": replace(
        _AUTOMODEL, elementwise=1.0, dispatches_once=True, splits_routed_tokens=True, routes_in_order=True
    ),
    "automodel-dense": _AUTOMODEL,
}
"""By source: what its program does, from its code, its paper or the remark of the row."""


@dataclass(frozen=True)
class Offer:
    """The layouts that a program can run, of those that the planner knows."""

    axes: tuple[str, ...] = AXES
    recompute: tuple[Recompute, ...] = tuple(Recompute)
    schedules: tuple[Schedule, ...] = tuple(Schedule)


_ALL_OR_NOTHING = (Recompute.NONE, Recompute.FULL)
_OF_MEGATRON = Offer(("pp", "dp_replicate", "tp"), _ALL_OR_NOTHING, (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED))
_OFFERS = {
    "mosaicml": Offer(("dp_shard",), _ALL_OR_NOTHING),
    "fms-fsdp": Offer(("dp_replicate", "dp_shard"), _ALL_OR_NOTHING),
    "megatron-2021": _OF_MEGATRON,
    "korthikanti-2022": _OF_MEGATRON,
    "mt-nlg": replace(_OF_MEGATRON, schedules=(Schedule.ONE_F_ONE_B,)),
    "bloom": Offer(("pp", "dp_shard", "tp"), _ALL_OR_NOTHING, (Schedule.ONE_F_ONE_B,)),
}
"""By source: Megatron-LM of 2021 had neither cp nor a sharded optimizer, and DeepSpeed's pipeline interleaves nothing.
Sources that are not here are programs with all axes."""
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}
"""huggingface.co/deepseek-ai/DeepSeek-V3, config.json."""
_GPT_OSS_WINDOW = 128
"""Tokens that a token sees in every second block (huggingface.co/openai/gpt-oss-20b, config.json, `layer_types`)."""
_MEGATRON_RUNS = ("megatron-2021", "korthikanti-2022", "mt-nlg", "bloom")
_PASSES = {"am2": 4}
"""Pipelines of a step, one after the other: batches of 8 for each data rank, accumulated 4 times (docs/
performance-summary.mdx of NeMo Automodel)."""
_NIC_SHARE = 0.8
"""Share of the bandwidth of network cards that collectives reach, as in `planner/gpus.py`."""


@dataclass(frozen=True)
class Comparison:
    """One published run beside its prediction."""

    row: dict[str, Any]
    tokens_per_s: float
    """Predicted, per GPU."""
    memory_gib: float
    """Predicted."""
    fits: bool
    may_fit: bool
    """Within the error of the prediction: a job is not refused."""
    parts: str
    """The largest parts of the step."""

    @property
    def name(self) -> str:
        return str(self.row["id"])

    @property
    def source(self) -> str:
        return str(self.row["group"])

    @property
    def published(self) -> dict[str, Any]:
        published: dict[str, Any] = self.row["published"]
        return published

    @property
    def speed_error(self) -> float | None:
        """Predicted over published, less 1; None if the row has no speed."""
        speed = self.published["tokens_per_s_per_gpu"]
        return self.tokens_per_s / speed - 1 if speed else None

    @property
    def memory_error(self) -> float | None:
        memory = self.published["memory_gib"]
        return self.memory_gib / memory - 1 if memory else None

    @property
    def kind(self) -> str:
        """The group of the summary."""
        if self.row["precision"] == "fp8":
            return "fp8"
        return "MoE" if self.row["model_shape"].get("num_experts") else f"dense {str(self.row['gpu']).split('-')[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", help="Only the rows of this source.")
    parser.add_argument("--parts", action="store_true", help="Also print the parts of each step.")
    parser.add_argument("--no-ranks", action="store_true", help="Do not enumerate all layouts of each run.")
    parser.add_argument("--page", type=Path, help="Write the summary into this page.")
    options = parser.parse_args()
    rows = [row for row in load_rows() if options.group in (None, row["group"])]
    comparisons = [compare(row) for row in rows]
    _print_table(comparisons, with_parts=options.parts)
    summary = summarise(comparisons, with_ranks=not options.no_ranks)
    print(json.dumps(summary))
    if options.page is not None:
        text = options.page.read_text(encoding="utf-8")
        before, rest = text.split(_BEGIN)
        lines = "\n".join(page_lines(summary))
        options.page.write_text(f"{before}{_BEGIN}\n{lines}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def load_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(_ROWS.read_text(encoding="utf-8"))["rows"]
    return [row | {"global_batch": row["global_batch"] // _PASSES.get(row["id"], 1)} for row in rows]


def compare(row: dict[str, Any]) -> Comparison:
    """Predict a row's run; of choices that its source leaves open, take the fastest that fits."""
    task = task_of(row)
    table = predict_columns(task, _columns(row, task.shape))
    best = int(table.order[0])
    step_s, tokens = float(table.step_s[best]), row["global_batch"] * row["seq"]
    seconds = sorted(((float(part[best]), name) for name, part in table.seconds.items()), reverse=True)
    sizes = sorted(((float(part[best]) / GIB, name) for name, part in table.bytes.items()), reverse=True)
    parts = " ".join(f"{name} {value / step_s:.0%}" for value, name in seconds if value > 0.005 * step_s)
    parts += " | " + " ".join(f"{name} {value:.1f}" for value, name in sizes if value > 0.5)
    # sources give what is reserved: besides what is allocated, the fragments that `usable` leaves room for
    memory_gib = float(table.memory_bytes[best]) / GIB / task.profile.usable
    return Comparison(
        row, tokens / step_s / row["gpus"], memory_gib, bool(table.fits[best]), bool(table.may_fit[best]), parts
    )


def task_of(row: dict[str, Any]) -> Task:
    batch = {"global_size": row["global_batch"], "micro_size": row["micro_batch"]}
    model: dict[str, Any] = {"model": {**row["model_shape"], "seq_len": row["seq"]}}
    if row["model"] == "deepseek-v3":
        model = {"task": HF_TASK, "model": {"config": _DEEPSEEK_V3, "seq_len": row["seq"]}}
    spec = parse_spec(
        {
            "stop": {"steps": 1},
            "data": {"corpus": "python-stdlib"},
            **model,
            "batch": batch,
            "precision": "bf16",
            "worker": {"gpus": 1},
            "elasticity": {"min_workers": 1, "max_workers": 1},
        }
    )
    shape = shape_of(spec)
    assert shape is not None
    if row["model"].startswith("gpt-oss"):
        shape = replace(shape, window=_GPT_OSS_WINDOW, windowed=0.5)
    if "GELU" in row["remarks"] and not shape.num_moe:
        shape = _with_gelu(shape, row["model_shape"]["hidden_dim"])
    return Task(spec, shape, _profile(row), stack=_stack(row))


def _with_gelu(shape: ModelShape, width: int) -> ModelShape:
    """The products of query, key and value in one, and those of a GELU whose SwiGLU of equal weights has this width."""
    query, key, out = shape.dense.products[:3]
    wide = 3 * width // 2
    products = (
        Product(shape.dim, query.outputs + 2 * key.outputs, "outputs"),
        out,
        Product(shape.dim, wide, "outputs"),
        Product(wide, shape.dim, "inputs"),
    )
    return replace(shape, dense=replace(shape.dense, products=products))


def _stack(row: dict[str, Any]) -> Stack:
    stack, remarks = _STACKS[row["group"]], row["remarks"]
    if row["group"] == "mosaicml" and row["gpus"] >= _SWEPT:
        # sweep.py of the same folder: `--attn_impl flash` for these models, gradients in bf16
        flash = row["model"] in ("mpt-1b", "mpt-3b", "mpt-7b", "mpt-70b") and row["gpu"] == "h100"
        kernel = AttentionKernel.FLASH_2 if flash else stack.attention
        stack = replace(stack, attention=kernel, gradient_bytes=2)
    if row["group"] == "bloom" and "summed in fp32" in remarks:
        stack = replace(_DEEPSPEED_BF16, launch_s=_LAUNCH_S)
    if "PURE" in remarks:
        stack = replace(stack, gradient_bytes=2)
    if "without sequence parallel" in remarks:
        stack = replace(stack, is_sequence_parallel=False)
    if row["group"] == "torchtitan" and ("compile" in remarks or "float8" in remarks):
        stack = replace(stack, elementwise=_COMPILED["elementwise"])
    if row["model"] == "gpt-oss-20b":  # `attn: flex` (examples/llm_benchmark/gpt_oss/gptoss_20b_te_deepep.yaml)
        stack = replace(stack, attention=AttentionKernel.FLASH_2)
    if "async TP" in remarks and "vanilla" not in remarks:
        stack = replace(stack, hides_tensor=True)
    is_fp8 = row["precision"] == "fp8"
    return replace(stack, fp8=is_fp8, gathers_fp8=is_fp8)


def _profile(row: dict[str, Any]) -> HardwareProfile:
    profile, network = PROFILES[row["gpu"]], row["network"] or {}
    updates: dict[str, Any] = {}
    if "between_gbs" in network:
        # of Bloom's cluster a ring over one card was measured; two GPUs share a card
        bandwidth = network.get("measured_gbs", _NIC_SHARE * network["between_gbs"]) * 1e9
        updates["between"] = profile.between.model_copy(update={"bandwidth": bandwidth})
    if "memory_gib" in network:
        updates["memory_bytes"] = round(network["memory_gib"] * GIB)
        updates["memory_bandwidth"] = profile.memory_bandwidth * 2400 / 3350
        updates["matmul_efficiency"] = _POWER_SHARE * profile.matmul_efficiency
        updates["attention_rates"] = {
            length: (_POWER_SHARE * forward, _POWER_SHARE * backward)
            for length, (forward, backward) in profile.attention_rates.items()
        }
    return profile.model_copy(update=updates)


def _columns(row: dict[str, Any], shape: ModelShape) -> Candidates:
    """The row's layout, once for each choice that it leaves open."""
    layout = row["layout"]
    degrees = {axis: layout.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    has_pp = degrees["pp"] > 1
    level = ShardLevel.GRADIENTS if _STACKS[row["group"]].shards_in_pipeline else ShardLevel.OPTIMIZER
    level = level if has_pp or layout["shard"] == "auto" else ShardLevel(layout["shard"])
    recomputes = list(Recompute) if layout["recompute"] == "auto" else [Recompute(layout["recompute"])]
    schedules: list[tuple[Schedule, int]] = [(Schedule.ONE_F_ONE_B, 1)]
    if layout["schedule"] == "interleaved_1f1b":
        most = shape.num_blocks // degrees["pp"]
        stages = [layout["stages_per_rank"]] if "stages_per_rank" in layout else [2, 4, most]
        schedules = [(Schedule.INTERLEAVED, min(number, -(-shape.num_blocks // degrees["pp"]))) for number in stages]
    elif layout["schedule"] == "auto" and has_pp:
        schedules += [(Schedule.INTERLEAVED, 2), (Schedule.INTERLEAVED, 4)]
    choices = [(recompute, *schedule) for recompute in recomputes for schedule in schedules]
    num, num_micro_batches = len(choices), row["global_batch"] // row["micro_batch"]

    def column(values: Iterable[int]) -> Ints:
        return np.array(list(values), np.int64)

    arrays: dict[str, Any] = {axis: column([degree] * num) for axis, degree in degrees.items()}
    schedule = column(SCHEDULES.index(schedule) for _, schedule, _ in choices)
    per_rank = column(stages for _, _, stages in choices)
    share = -(-num_micro_batches // (arrays["dp_replicate"] * arrays["dp_shard"]))
    return Candidates(
        **arrays,
        level=column([LEVELS.index(level)] * num),
        schedule=schedule,
        per_rank=per_rank,
        recompute=column(RECOMPUTES.index(recompute) for recompute, _, _ in choices),
        context=column([CONTEXTS.index(ContextMethod.ALL_GATHER)] * num),
        cut=column(range(num)),
        fed=fed_micro_batches(schedule, arrays["pp"], per_rank, share),
        cuts=tuple(_cut(row, shape, degrees["pp"], stages) for _, _, stages in choices),
    )


def _cut(row: dict[str, Any], shape: ModelShape, pp: int, stages_per_rank: int) -> Cut:
    """Megatron gives each stage equally many blocks; balanced where they do not divide. Of Llama 3's stages, the first
    has only the embedding and the last only the head (its paper, section 3.3.2)."""
    if row["group"] == "llama3-paper":
        return cut_at(shape, (0, *(1,) * shape.num_blocks, 0), pp)
    size, rest = divmod(shape.num_blocks, pp * stages_per_rank)
    if rest or row["group"] not in _MEGATRON_RUNS:
        return cut(shape, pp, stages_per_rank, is_v_shaped=False)
    return cut_at(shape, (size,) * (pp * stages_per_rank), pp)


def summarise(comparisons: Sequence[Comparison], *, with_ranks: bool) -> dict[str, Any]:
    """Print the medians and shares that docs/planner.md has, and return them."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for comparison in comparisons:
        if comparison.speed_error is not None:
            by_kind[comparison.kind].append(comparison.speed_error)
    groups = {"all": [error for errors in by_kind.values() for error in errors], **by_kind}
    summary: dict[str, Any] = {"speed": {name: _errors(errors) for name, errors in groups.items() if errors}}
    memory = [comparison.memory_error for comparison in comparisons if comparison.memory_error is not None]
    summary["memory"] = _errors(memory) if memory else {}
    ran = [comparison for comparison in comparisons if not comparison.published["out_of_memory"]]
    summary["ran_but_refused"] = [comparison.name for comparison in ran if not comparison.may_fit]
    summary["ran_but_not_preferred"] = [comparison.name for comparison in ran if not comparison.fits]
    failed = [comparison for comparison in comparisons if comparison.published["out_of_memory"]]
    summary["failed_but_accepted"] = [comparison.name for comparison in failed if comparison.may_fit]
    bloom = [comparison for comparison in ran if comparison.row["model"] == "bloom-14336x72"]
    summary["bloom_order"] = round(_spearman(bloom), 2) if len(bloom) > 2 else None
    summary["leave_one_source_out"] = leave_one_source_out(comparisons)
    if with_ranks:
        summary["published_degrees"] = published_degrees(ran)
    for name, value in summary.items():
        print(f"{name}: {json.dumps(value)}")
    return summary


def page_lines(summary: dict[str, Any]) -> list[str]:
    """The summary as Markdown."""
    lines = ["| runs | number | median error | within 20 % |", "|---|---:|---:|---:|"]
    named = {**{f"speed, {name}": errors for name, errors in summary["speed"].items()}, "memory": summary["memory"]}
    for name, errors in named.items():
        lines.append(f"| {name} | {errors['rows']} | {errors['median']:.1%} | {errors['within_20']:.0%} |")
    left_out = summary["leave_one_source_out"]
    lines += [
        "",
        f"- Each source predicted with the correction of the others: {left_out['within_20']:.0%} within 20 %.",
        f"- Error bars contain {left_out['covered']:.0%}, without any job {left_out['covered_without_jobs']:.0%}; they "
        f"are made for {left_out['covered_target']:.0%}.",
        f"- Runs that are refused: {len(summary['ran_but_refused'])}. Runs that are predicted to fit only within the "
        f"error of the prediction: {len(summary['ran_but_not_preferred'])}. Layouts that ran out of memory and are "
        f"accepted: {len(summary['failed_but_accepted'])}.",
        f"- Order of Bloom's layouts of one model (Spearman): {summary['bloom_order']}.",
    ]
    if "published_degrees" in summary:
        degrees = summary["published_degrees"]
        lines.append(
            f"- The published degrees are in the best tenth of the list for {degrees['in_best_tenth']:.0%} of the "
            f"runs, in the median number {degrees['median_place']:.0f}. If only what each program can do is listed, "
            f"and only the fastest of the layouts that a source compares counts: for {degrees['of_programs']:.0%} of "
            f"{degrees['jobs_of_programs']} jobs."
        )
    return lines


def _errors(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(sizes),
        "median": round(statistics.median(sizes), 3),
        "within_20": round(sum(size <= _NEAR for size in sizes) / len(sizes), 2),
        "signed_median": round(statistics.median(errors), 3),
    }


def _spearman(comparisons: Sequence[Comparison]) -> float:
    predicted = _ranks([comparison.tokens_per_s for comparison in comparisons])
    published = _ranks([comparison.published["tokens_per_s_per_gpu"] for comparison in comparisons])
    return float(np.corrcoef(predicted, published)[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    return [float(sum(other < value for other in values)) for value in values]


def leave_one_source_out(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Correct each source by the rows of the others only, as the planner corrects jobs by earlier ones, and count what
    the error bars contain: with those rows, and without any."""
    with_speed = [comparison for comparison in comparisons if comparison.speed_error is not None]
    near, covered, alone = [], [], []
    prior = estimate_correction((), DeviceKind.GPU)
    for source in sorted({comparison.source for comparison in with_speed}):
        others = [_observation(comparison) for comparison in with_speed if comparison.source != source]
        correction = estimate_correction(others, DeviceKind.GPU)
        for comparison in with_speed:
            if comparison.source == source:
                job = _observation(comparison)
                ratio = job.measured_s / (correction.factor * job.predicted_s)
                near.append(abs(1 / ratio - 1) <= _NEAR)
                covered.append(abs(np.log(ratio)) <= np.log1p(correction.error))
                alone.append(abs(np.log(job.measured_s / job.predicted_s)) <= np.log1p(prior.error))
    if not near:
        return {}
    shares = {"within_20": near, "covered": covered, "covered_without_jobs": alone}
    return {name: round(sum(found) / len(found), 2) for name, found in shares.items()} | {"covered_target": 0.8}


def _observation(comparison: Comparison) -> Observation:
    """Seconds for a million tokens of one GPU."""
    return Observation(1e6 / comparison.tokens_per_s, 1e6 / comparison.published["tokens_per_s_per_gpu"])


def published_degrees(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The place of each published combination of degrees among all that the planner lists for that job.

    `of_programs` counts only what the program of a source can do, where that leaves a choice, and of the layouts that a
    source compares for one job only the fastest."""
    measured = [comparison for comparison in comparisons if comparison.speed_error is not None]
    fastest: dict[str, Comparison] = {}
    for comparison in sorted(measured, key=lambda comparison: comparison.published["tokens_per_s_per_gpu"]):
        names = ("group", "model", "gpu", "network", "gpus", "seq", "precision")
        fastest[json.dumps([comparison.row[name] for name in names])] = comparison
    tables: dict[str, LayoutTable] = {}
    shares, places, missing, of_programs = [], [], [], []
    for comparison in measured:
        row = comparison.row
        key = json.dumps({name: value for name, value in row.items() if name not in ("id", "layout", "published")})
        if key not in tables:
            tables[key] = predict_layouts(task_of(row), [row["gpus"]])
        place, number = _place(row, tables[key])
        if place is None:
            missing.append(comparison.name)
        else:
            places.append(place + 1)
        shares.append(1.0 if place is None else place / number)
        place, number = _place(row, select_layouts(tables[key], _offered(row, tables[key].columns)))
        if number > 1 and comparison in fastest.values():
            of_programs.append(1.0 if place is None else place / number)
    return {
        "rows": len(shares),
        "median_place": statistics.median(places),
        "in_best_tenth": round(sum(share <= _BEST_SHARE for share in shares) / len(shares), 2),
        "not_listed": missing,
        "of_programs": round(sum(share <= _BEST_SHARE for share in of_programs) / max(1, len(of_programs)), 2),
        "jobs_of_programs": len(of_programs),
    }


def _place(row: dict[str, Any], table: LayoutTable) -> tuple[int | None, int]:
    """Return the place of the row's degrees among all combinations, and their number; both kinds of dp are one."""
    columns = table.columns
    data = columns.dp_replicate * columns.dp_shard
    degrees = np.stack([columns.pp, data, columns.cp, columns.tp, columns.ep])[:, table.order]
    combinations = list(dict.fromkeys(tuple(map(int, column)) for column in degrees.T))
    published = _degrees(row["layout"])
    return combinations.index(published) if published in combinations else None, len(combinations)


def _offered(row: dict[str, Any], columns: Candidates) -> np.ndarray:
    """A mask of the layouts that the row's program can run."""
    offer = _OFFERS.get(row["group"], Offer())
    mask = np.isin(columns.recompute, [RECOMPUTES.index(mode) for mode in offer.recompute])
    mask &= np.isin(columns.schedule, [SCHEDULES.index(schedule) for schedule in offer.schedules])
    for axis in set(AXES) - set(offer.axes):
        mask &= getattr(columns, axis) == 1
    return mask


def _degrees(layout: dict[str, Any]) -> tuple[int, ...]:
    data = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    return layout.get("pp", 1), data, layout.get("cp", 1), layout.get("tp", 1), layout.get("ep", 1)


def _print_table(comparisons: Sequence[Comparison], *, with_parts: bool) -> None:
    heads = f"{'run':20} {'gpu':9} {'gpus':>6} {'layout':26} {'tokens/s':>8} {'predicted':>9} {'error':>7}"
    print(f"{heads} {'GiB':>5} {'pred.':>6} {'error':>7} fits")
    for comparison in comparisons:
        row, layout = comparison.row, comparison.row["layout"]
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        short = " ".join(f"{axis.removeprefix('dp_')}{layout[axis]}" for axis in axes if layout.get(axis, 1) > 1)
        published = comparison.published
        line = f"{comparison.name:20} {row['gpu']:9} {row['gpus']:6} {short:26}"
        line += f" {published['tokens_per_s_per_gpu'] or '-':>8} {comparison.tokens_per_s:9.1f}"
        line += f" {_percent(comparison.speed_error):>7} {published['memory_gib'] or '-':>5}"
        line += f" {comparison.memory_gib:6.1f} {_percent(comparison.memory_error):>7}"
        ran = "out of memory" if published["out_of_memory"] else "ran"
        fits = "yes" if comparison.fits else "perhaps" if comparison.may_fit else "no"
        print(line, f"{fits}, {ran}")
        if with_parts:
            print(f"    {comparison.parts}")


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


if __name__ == "__main__":
    main()
