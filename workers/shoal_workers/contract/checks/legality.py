"""Rules that a layout must satisfy to train a job, and whether a job's numbers of workers have a legal layout at all.

Each violation is a sentence with the arithmetic and the way out. Called by the submit check (`spec_errors.parse_spec`),
by the planner, and by `shoal plan` for layouts that a user requests. Pure. The planner estimates memory; this does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.hugging_face import PretrainedConfig, architecture_of, dropout_of
from shoal_workers.contract.hugging_face_plan import axes_of_family, why_not
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.layout import (
    AXES,
    MAX_PADDING,
    ContextMethod,
    Layout,
    ParallelismSpec,
    Recompute,
    Schedule,
    ShardLevel,
    longest_share,
    micro_batches_fed,
    num_stages,
    plain,
    replicated,
)
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.rules import Rule, SpecProblem
from shoal_workers.contract.spec import BatchSync, JobSpec, Precision, plan_of, varies_in_length
from shoal_workers.contract.text_data import SECTIONS, pretrained_of


class LayoutRule(StrEnum):
    """Rules that a layout must satisfy; the docstring of each says what it demands."""

    NEEDS_PLAN = "needs_plan"
    """tp, pp and cp need a plan of the model."""
    MICRO_BATCHES_FILL_RANKS = "micro_batches_fill_ranks"
    """Every data rank has at least one real micro-batch."""
    HEADS_DIVISIBLE = "heads_divisible"
    KV_HEADS_DIVISIBLE = "kv_heads_divisible"
    WIDTH_DIVISIBLE = "width_divisible"
    SEQUENCE_DIVISIBLE = "sequence_divisible"
    """cp splits a sequence into 2 cp equal pieces, and tp splits what each cp rank has: one piece from the head and one
    from the tail, so that causal attention costs the same on all ranks."""
    ULYSSES_DIVIDES_HEADS = "ulysses_divides_heads"
    STAGES_FIT_LAYERS = "stages_fit_layers"
    """Every pipeline stage has at least one block, and every block belongs to a stage."""
    STAGES_FIT_SCHEDULE = "stages_fit_schedule"
    """GPipe and 1F1B run one stage on each rank."""
    V_SCHEDULE_NEEDS_TWO_STAGES_PER_RANK = "v_schedule_needs_two_stages_per_rank"
    PIPELINE_NEEDS_MICRO_BATCHES = "pipeline_needs_micro_batches"
    EP_NEEDS_EXPERTS = "ep_needs_experts"
    EXPERTS_DIVISIBLE = "experts_divisible"
    EP_DIVIDES_DP_SHARD = "ep_divides_dp_shard"
    DETERMINISTIC_NEEDS_DATA_AXES = "deterministic_needs_data_axes"
    INT8_NEEDS_ONE_TP_RANK = "int8_needs_one_tp_rank"
    """tp ranks would round the gradients of parameters that all of them hold differently, and drift apart."""
    SYNC_NEEDS_DATA_AXES = "sync_needs_data_axes"
    """The statistics of a global batch are those of whole activations."""
    NONE_NEEDS_WHOLE_MODEL = "none_needs_whole_model"
    """shard none keeps the task's own module: no axis may split it, and nothing may cast or move its parameters."""
    DROPOUT_NEEDS_DATA_AXES = "dropout_needs_data_axes"
    """Dropout draws one mask per micro-batch; ranks that hold parts of an activation would draw different masks."""


class Violation(Frozen):
    """A rule that a layout breaks."""

    rule: LayoutRule
    axis: str
    """The axis or setting to change: tp, pp, cp, ep, dp_shard, schedule, stages, shard."""
    message: str
    """What is wrong, with the arithmetic and the nearest legal choice."""


def violations(layout: Layout, spec: JobSpec, plan: ParallelPlan | None) -> tuple[Violation, ...]:
    """All rules that the layout breaks; (): the layout is legal."""
    return tuple(_violations(layout, spec, plan))


def _violations(layout: Layout, spec: JobSpec, plan: ParallelPlan | None) -> Iterator[Violation]:
    yield from _plain(layout, spec)
    yield from _axes_ruled_out(layout, spec)
    yield from _data_ranks(layout, spec)
    missing = tuple(_missing_plan(layout, spec, plan))
    yield from missing
    known = ParallelPlan() if plan is None else plan
    unknown = {violation.axis for violation in missing}
    if layout.tp > 1 and "tp" not in unknown:
        yield from _tensor(layout, known)
    if layout.tp * layout.cp > 1 and not {"tp", "cp"} & unknown:
        yield from _sequence(layout, known)
    if layout.cp > 1 and layout.context is ContextMethod.ULYSSES and "cp" not in unknown:
        yield from _ulysses(layout, known)
    if layout.pp > 1 and "pp" not in unknown:
        yield from _stages(layout, known)
    if layout.pp > 1:
        yield from _pipeline_fed(layout, spec)
    if layout.ep > 1:
        pretrained = pretrained_of(spec.task, spec.model) if spec.plan is None else None
        if pretrained is not None and not known.experts:
            yield _architecture("ep", layout.ep, pretrained, spec)
        else:
            yield from _experts(layout, known)


def _plain(layout: Layout, spec: JobSpec) -> Iterator[Violation]:
    if layout.shard is not ShardLevel.NONE:
        return
    split = [f"{axis} is {degree}" for axis in AXES if axis != "dp_replicate" and (degree := getattr(layout, axis)) > 1]
    for why in [*split, *why_not_plain(spec)]:
        yield Violation(
            rule=LayoutRule.NONE_NEEDS_WHOLE_MODEL,
            axis="shard",
            message=f"shard is none, which trains the task's own module on every worker, and {why}. Set shard to "
            "optimizer, gradients or full, or leave it out.",
        )


_PLAIN_RULES: tuple[Rule[JobSpec], ...] = (
    Rule(
        lambda spec: spec.precision is not Precision.FP32,
        lambda spec: f"precision is {spec.precision}, to which FSDP2 casts parameters that it has sharded",
    ),
    Rule(lambda spec: spec.module_precision, "module_precision gives some modules another type"),
    Rule(
        lambda spec: spec.sum_precision is not Precision.FP32,
        lambda spec: f"reduce_precision is {spec.reduce_precision}",
    ),
    Rule(lambda spec: spec.fp8 is not None, lambda spec: f"fp8 is {spec.fp8}"),
    Rule(lambda spec: spec.deterministic, "deterministic is true, whose exact sums are those of shards"),
    Rule(
        lambda spec: isinstance(spec.parallelism, ParallelismSpec) and spec.parallelism.offload,
        "parallelism.offload is true",
    ),
)
"""Settings of a task with which no worker can train the task's own module."""


def why_not_plain(spec: JobSpec) -> list[str]:
    """List the settings of a task with which no worker can train the task's own module; none: it can."""
    return [rule.describe(spec) for rule in _PLAIN_RULES if rule.is_broken(spec)]


def is_plain_by_default(spec: JobSpec) -> bool:
    """Return whether workers train the task's own module, as long as its whole state fits: a task on CPUs, whose spec
    fixes no layout and has no setting that plain replicas lack."""
    is_free = spec.program is None and spec.parallelism == "auto" and not spec.worker.gpus
    return is_free and not any(why_not_plain(spec))


def may_write_parameters(layout: Layout, spec: JobSpec) -> bool:
    """Return whether a forward pass may write to parameters, as in a plain loop: no other worker would have other
    values, now or later, no snapshot of the step before would be changed, and no other micro-batch of the step sees the
    buffers (a flag) as they were before."""
    is_alone = layout.world_size == spec.elasticity.max_workers == spec.batch.num_micro_batches == 1
    return is_alone and layout.shard is ShardLevel.NONE and not spec.snapshot.enabled


@dataclass(frozen=True, slots=True)
class RuledOut:
    """Axes that a setting rules out."""

    rule: LayoutRule
    axes: tuple[str, ...]
    setting: Rule[JobSpec]
    """Broken by the setting, which its text explains."""
    otherwise: Callable[[JobSpec], str]
    """Another way out than a degree of 1."""


_RULED_OUT = (
    RuledOut(
        LayoutRule.DETERMINISTIC_NEEDS_DATA_AXES,
        ("pp", "dp_replicate", "cp", "tp", "ep"),
        Rule(lambda spec: spec.deterministic, "deterministic: true sums in one fixed order along dp_shard only"),
        lambda spec: "deterministic to false",
    ),
    RuledOut(
        LayoutRule.INT8_NEEDS_ONE_TP_RANK,
        ("tp",),
        Rule(
            lambda spec: spec.rounds_sums,
            "reduce_precision int8 rounds at random, so tp ranks would get different gradients of parameters that all "
            "hold",
        ),
        lambda spec: "reduce_precision to fp32 or bf16",
    ),
    RuledOut(
        LayoutRule.SYNC_NEEDS_DATA_AXES,
        ("pp", "cp", "tp", "ep"),
        Rule(
            lambda spec: spec.batch.sync is BatchSync.GLOBAL,
            "batch.sync global normalises over the samples of the data axes only",
        ),
        lambda spec: "batch.sync to micro_batch",
    ),
    RuledOut(
        LayoutRule.DROPOUT_NEEDS_DATA_AXES,
        ("tp", "cp", "pp"),
        Rule(
            lambda spec: _dropout(spec)[1],
            lambda spec: "model.{} {} draws its masks per micro-batch, which is exact on the data axes only".format(
                *_dropout(spec)
            ),
        ),
        lambda spec: f"model.{_dropout(spec)[0]} to 0",
    ),
)


def _axes_ruled_out(layout: Layout, spec: JobSpec) -> Iterator[Violation]:
    for row in _RULED_OUT:
        used = [axis for axis in row.axes if getattr(layout, axis) > 1]
        for axis in used if used and row.setting.is_broken(spec) else ():
            why = f"{axis} is {getattr(layout, axis)}, but {row.setting.describe(spec)}"
            message = f"{why}. Set {axis} to 1, or {row.otherwise(spec)}."
            yield Violation(rule=row.rule, axis=axis, message=message)


def _dropout(spec: JobSpec) -> tuple[str, float]:
    """Return the key of the model's dropout, and its value.

    0: there is none, or the axes that it rules out are refused in any case."""
    pretrained = pretrained_of(spec.task, spec.model)
    if pretrained is None:
        return "dropout", spec.model.get("dropout", 0) if spec.task == LM_TASK else 0
    is_refused = spec.plan is None and spec.task in SECTIONS
    return (None if is_refused else dropout_of(pretrained)) or ("dropout", 0)


def _data_ranks(layout: Layout, spec: JobSpec) -> Iterator[Violation]:
    have, ranks = spec.batch.num_micro_batches, layout.num_data_ranks
    if ranks > have:
        yield Violation(
            rule=LayoutRule.MICRO_BATCHES_FILL_RANKS,
            axis="dp_shard",
            message=f"dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard} = {ranks} data ranks are more "
            f"than the {have} micro-batches a step (batch.global_size {spec.batch.global_size} / batch.micro_size "
            f"{spec.batch.micro_size}): {ranks - have} would have nothing to do. Use at most {have} data ranks, or "
            "use more and smaller micro-batches.",
        )


_SECTIONS: dict[str, tuple[str, Callable[[ParallelPlan], bool]]] = {
    "tp": ("tensor", lambda plan: bool(plan.tensor)),
    "pp": ("blocks, num_blocks and hidden_size", lambda p: bool(p.blocks and p.num_blocks and p.hidden_size)),
    "cp": ("attention, sequence and seq_len", lambda p: bool(p.attention and p.sequence and p.seq_len)),
}
"""Axis -> the keys of the plan that it needs, in words, and whether a plan has them."""


def _missing_plan(layout: Layout, spec: JobSpec, plan: ParallelPlan | None) -> Iterator[Violation]:
    for axis, (section, is_there) in _SECTIONS.items():
        degree = getattr(layout, axis)
        if degree == 1 or (plan is not None and is_there(plan)):
            continue
        why = f"task {spec.task!r} declares no plan" if plan is None else f"the plan has no {section}"
        pretrained = pretrained_of(spec.task, spec.model) if spec.plan is None else None
        if pretrained is not None:
            yield _architecture(axis, degree, pretrained, spec)
            continue
        yield Violation(
            rule=LayoutRule.NEEDS_PLAN,
            axis=axis,
            message=f"{axis} is {degree}, but {why}, which says how the model may be split. Set {axis} to 1, or "
            f"declare plan.{section.replace(', ', ', plan.').replace(' and ', ' and plan.')} (docs/parallelism.md).",
        )


def _architecture(axis: str, degree: int, settings: PretrainedConfig, spec: JobSpec) -> Violation:
    """Return the violation by a Hugging Face model that Shoal cannot split along this axis."""
    if axis == "pp" and varies_in_length(spec):
        return Violation(
            rule=LayoutRule.NEEDS_PLAN,
            axis=axis,
            message=f"pp is {degree}, and data.max_tokens is {spec.data['max_tokens']}: the stages of a pipeline hand "
            "over tensors of one shape, and every micro-batch has another one. Set pp to 1, or remove data.max_tokens.",
        )
    architecture = architecture_of(settings)
    name = f"the architecture {architecture!r}" if architecture else "this model"
    return Violation(
        rule=LayoutRule.EP_NEEDS_EXPERTS if axis == "ep" else LayoutRule.NEEDS_PLAN,
        axis=axis,
        message=f"{axis} is {degree}, but {name} has no plan for {axis} ({why_not(settings, axis)}). Its axes are "
        f"{', '.join(axes_of_family(settings))}. Set {axis} to 1, or declare a plan (docs/hugging-face.md).",
    )


def _tensor(layout: Layout, plan: ParallelPlan) -> Iterator[Violation]:
    sizes = [
        (LayoutRule.HEADS_DIVISIBLE, "the number of attention heads,", plan.num_heads),
        (LayoutRule.KV_HEADS_DIVISIBLE, "the number of key and value heads,", plan.num_kv_heads),
        *((LayoutRule.WIDTH_DIVISIBLE, name, size) for name, size in plan.widths.items()),
    ]
    for rule, name, size in sizes:
        if rule is LayoutRule.KV_HEADS_DIVISIBLE and plan.num_heads % layout.tp:
            continue  # reported already: the key and value heads divide the query heads
        if size % layout.tp:
            yield Violation(
                rule=rule,
                axis="tp",
                message=f"tp {layout.tp} does not divide {name} {size}: "
                f"{_division(size, layout.tp)}. {_use('tp', nearest_divisors(size, layout.tp))}.",
            )


def _sequence(layout: Layout, plan: ParallelPlan) -> Iterator[Violation]:
    length, cp, tp = plan.seq_len, layout.cp, layout.tp
    if not length:
        return
    if cp > 1 and length % (2 * cp):
        legal = nearest_divisors(length // 2, cp) if length % 2 == 0 else (1,)
        yield Violation(
            rule=LayoutRule.SEQUENCE_DIVISIBLE,
            axis="cp",
            message=f"cp {cp} splits a sequence into 2 x {cp} = {2 * cp} pieces, a head and a tail for each rank, but "
            f"{_division(length, 2 * cp)}. {_use('cp', legal)}, or another sequence length.",
        )
    elif tp > 1 and (length // cp) % tp:
        part = length // cp
        yield Violation(
            rule=LayoutRule.SEQUENCE_DIVISIBLE,
            axis="tp",
            message=f"tp {tp} splits the {part} tokens that each rank has of a sequence ({length} / cp {cp}), but "
            f"{_division(part, tp)}. {_use('tp', nearest_divisors(part, tp))}, or another sequence length.",
        )


def _ulysses(layout: Layout, plan: ParallelPlan) -> Iterator[Violation]:
    """Check the query heads only: if there are too few key and value heads, they are copied."""
    left, cp = plan.num_heads // layout.tp, layout.cp
    if plan.num_heads % layout.tp == 0 and left % cp:
        yield Violation(
            rule=LayoutRule.ULYSSES_DIVIDES_HEADS,
            axis="context",
            message=f"context ulysses exchanges heads for tokens, but tp {layout.tp} leaves {left} of "
            f"{plan.num_heads} heads, and {_division(left, cp)}. "
            f"{_use('cp', nearest_divisors(left, cp))}, or context all_gather.",
        )


def _stages(layout: Layout, plan: ParallelPlan) -> Iterator[Violation]:
    stages, blocks = num_stages(layout), plan.num_blocks
    if stages > blocks:
        per_rank = max(1, stages // layout.pp)
        yield Violation(
            rule=LayoutRule.STAGES_FIT_LAYERS,
            axis="pp",
            message=f"{stages} pipeline stages (pp {layout.pp} x {per_rank} on each rank) are more than the {blocks} "
            f"blocks of the model. Use a pp of at most {blocks // per_rank}.",
        )
    elif layout.stages and (sum(layout.stages) != blocks or min(layout.stages) < 1):
        yield Violation(
            rule=LayoutRule.STAGES_FIT_LAYERS,
            axis="stages",
            message=f"stages {list(layout.stages)} hold {sum(layout.stages)} blocks, at least {min(layout.stages)} "
            f"each; the model has {blocks}, and a stage needs at least 1.",
        )
    if layout.schedule.is_v_shaped:
        if stages != 2 * layout.pp:
            yield Violation(
                rule=LayoutRule.V_SCHEDULE_NEEDS_TWO_STAGES_PER_RANK,
                axis="stages",
                message=f"schedule {layout.schedule} runs 2 stages on each rank: pp {layout.pp} needs "
                f"{2 * layout.pp} of them, not {stages}.",
            )
    elif stages % layout.pp or (stages != layout.pp and layout.schedule is not Schedule.INTERLEAVED):
        each = "the same number of stages" if layout.schedule is Schedule.INTERLEAVED else "1 stage"
        yield Violation(
            rule=LayoutRule.STAGES_FIT_SCHEDULE,
            axis="stages",
            message=f"schedule {layout.schedule} runs {each} on each rank, but {_division(stages, layout.pp)}.",
        )


def _pipeline_fed(layout: Layout, spec: JobSpec) -> Iterator[Violation]:
    share = longest_share(layout, spec.batch.num_micro_batches)
    fed = micro_batches_fed(layout, spec.batch.num_micro_batches)
    if fed > MAX_PADDING * share:
        yield Violation(
            rule=LayoutRule.PIPELINE_NEEDS_MICRO_BATCHES,
            axis="pp",
            message=f"the batch is smaller than the pipeline needs: schedule {layout.schedule} with "
            f"{num_stages(layout)} stages runs {fed} micro-batches on each of {layout.num_data_ranks} data ranks, of "
            f"which at most {share} would be real; more than {MAX_PADDING} times the real ones is refused. Use a "
            f"smaller pp, fewer data ranks, a batch.micro_size below {spec.batch.micro_size}, or schedule gpipe.",
        )


def _experts(layout: Layout, plan: ParallelPlan) -> Iterator[Violation]:
    if not plan.experts or not plan.num_experts:
        yield Violation(
            rule=LayoutRule.EP_NEEDS_EXPERTS,
            axis="ep",
            message=f"ep is {layout.ep}, but the model has no known experts. Set ep to 1, or "
            "model.num_experts (a task of your own: plan.experts and plan.num_experts).",
        )
        return
    if plan.num_experts % layout.ep:
        yield Violation(
            rule=LayoutRule.EXPERTS_DIVISIBLE,
            axis="ep",
            message=f"ep {layout.ep} does not divide the {plan.num_experts} experts: "
            f"{_division(plan.num_experts, layout.ep)}. {_use('ep', nearest_divisors(plan.num_experts, layout.ep))}.",
        )
    if layout.dp_shard % layout.ep:
        yield Violation(
            rule=LayoutRule.EP_DIVIDES_DP_SHARD,
            axis="ep",
            message=f"ep {layout.ep} takes its ranks from dp_shard {layout.dp_shard}, but "
            f"{_division(layout.dp_shard, layout.ep)}. {_use('ep', nearest_divisors(layout.dp_shard, layout.ep))}, or "
            f"a dp_shard that is a multiple of {layout.ep}.",
        )


def nearest_divisors(size: int, desired: int) -> tuple[int, ...]:
    """Return the largest divisor of `size` that is at most `desired`, then the smallest one that is at least `desired`.

    Both are searched within a distance of `_FAR`. If there is none, the first is 1, and the second is left out.
    """
    near = min(desired, size)
    below = next((n for n in range(near, max(0, near - _FAR), -1) if size % n == 0), 1)
    above = next((n for n in range(desired, min(size, desired + _FAR) + 1) if size % n == 0), None)
    return (below,) if above is None else (below, above)


_FAR = 4096
"""Distance that a search for divisors covers: a size may have 64 bits, and a divisor farther from the request would not
help."""


def _use(axis: str, choices: tuple[int, ...]) -> str:
    return f"Use {axis} {' or '.join(str(choice) for choice in dict.fromkeys(choices))}"


def _division(size: int, by: int) -> str:
    return f"{size} = {size // by} x {by} + {size % by}"


_MAX_DEGREE = 4096
"""Largest degree of one axis that is considered."""


@dataclass(frozen=True, slots=True)
class LegalDegrees:
    """Degrees of each axis that break no rule while the others are 1, ascending."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    ep: tuple[int, ...]
    seq_len: int = 0

    def together(self, tp: int, cp: int) -> bool:
        """Return whether tp divides the tokens that each cp rank has of a sequence."""
        return self.seq_len // cp % tp == 0

    def model_degrees(self) -> tuple[int, ...]:
        """All products tp x cp x pp, ascending."""
        within = {tp * cp for tp in self.tp for cp in self.cp if self.together(tp, cp)}
        return tuple(sorted({part * pp for part in within for pp in self.pp}))


def find_infeasible(spec: JobSpec) -> tuple[SpecProblem, ...]:
    """Return the settings for which no layout exists, whatever the planner chooses. (): every world size from
    min_workers to max_workers has a layout, possibly with idle ranks."""
    if spec.program is not None:
        return ()  # it splits its own work
    plan = plan_of(spec)
    fixed = spec.parallelism if isinstance(spec.parallelism, ParallelismSpec) else None
    problems = list(_fixed(spec, fixed, plan)) if fixed is not None else []
    return tuple(problems) or tuple(_most_workers(spec, fixed, plan))


def legal_degrees(spec: JobSpec, plan: ParallelPlan | None) -> LegalDegrees:
    """Return the legal degrees of each axis while the others are 1 (for ep: while dp_shard is large enough)."""
    if plan is None:
        return LegalDegrees((1,), (1,), (1,), (1,))
    sizes = [n for n in (plan.num_heads, plan.num_kv_heads, *plan.widths.values(), plan.seq_len) if n]
    sized_spec = spec.model_copy(update={"batch": spec.batch.model_copy(update={"global_size": spec.batch.micro_size})})

    def legal(axis: str, candidates: Iterable[int]) -> tuple[int, ...]:
        # gpipe accepts any number of micro-batches, so the batch rules out no degree
        layouts = (Layout.model_validate({axis: n, "schedule": Schedule.GPIPE}) for n in candidates)
        return tuple(getattr(x, axis) for x in layouts if not violations(x, sized_spec, plan)) or (1,)

    ep = tuple(_divisors(plan.num_experts)) if plan.experts and not spec.deterministic else ()
    return LegalDegrees(
        # tp must divide every one of the sizes, so it also divides the smallest; cp must divide half a sequence
        tp=legal("tp", _divisors(min(sizes)) if sizes else range(1, _MAX_DEGREE + 1)),
        cp=legal("cp", _divisors(plan.seq_len // 2)),
        pp=legal("pp", range(1, min(plan.num_blocks, _MAX_DEGREE) + 1)),
        ep=ep or (1,),
        seq_len=plan.seq_len,
    )


def _divisors(size: int) -> Iterator[int]:
    return (n for n in range(1, min(size, _MAX_DEGREE) + 1) if size % n == 0)


def fixed_layout(fixed: ParallelismSpec, world_size: int, plan: ParallelPlan | None) -> Layout | None:
    """Return the layout of fixed degrees at a world size; None if the world size is not their product. Settings that
    are "auto" get the choice that is always legal."""
    if fixed.shard is ShardLevel.NONE:
        recompute = Recompute.NONE if fixed.recompute == "auto" else fixed.recompute
        return plain(world_size).model_copy(update={"recompute": recompute})
    dp_shard, left = divmod(world_size, fixed.model_degree * fixed.dp_replicate)
    if left or not dp_shard or fixed.dp_shard not in ("auto", dp_shard):
        return None
    schedule = Schedule.GPIPE if fixed.schedule == "auto" else fixed.schedule
    shard = ShardLevel.FULL if fixed.shard == "auto" else fixed.shard
    per_rank = 2 if fixed.pp > 1 and (schedule.is_v_shaped or schedule is Schedule.INTERLEAVED) else 1
    return Layout(
        pp=fixed.pp,
        dp_replicate=fixed.dp_replicate,
        dp_shard=dp_shard,
        cp=fixed.cp,
        tp=fixed.tp,
        ep=fixed.ep,
        shard=shard,
        schedule=schedule,
        stages=even_stages(plan.num_blocks if plan else 0, fixed.pp * per_rank) if 1 < fixed.pp <= _MAX_DEGREE else (),
        offload=fixed.offload,
        context=ContextMethod.ALL_GATHER if fixed.context == "auto" else fixed.context,
        recompute=Recompute.NONE if fixed.recompute == "auto" else fixed.recompute,
    )


def loop_layout(parallelism: ParallelismSpec | Literal["auto"], world_size: int) -> Layout:
    """Return the layout of a loop: every rank has everything, unless degrees are fixed. Degrees that do not fit the
    world size become others, or leave ranks idle, as `otherwise` says. A world that is smaller than their product is
    sharded over all of its ranks."""
    if not isinstance(parallelism, ParallelismSpec):
        return replicated(world_size)
    unit, shards = parallelism.unit, parallelism.dp_shard
    level = ShardLevel.FULL if parallelism.shard == "auto" else parallelism.shard
    if parallelism.otherwise == "idle" and world_size > unit:
        world_size = world_size // unit * unit if shards == "auto" else unit
    if shards == "auto":
        degree = world_size if world_size % unit else world_size // unit
    else:
        degree = world_size if world_size % shards else shards
    return Layout(dp_replicate=world_size // degree, dp_shard=degree, shard=level)


def even_stages(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Number of blocks of each stage; earlier stages have one more. Some have 0 if there are more stages than
    blocks."""
    base, extra = divmod(num_blocks, num_stages)
    return tuple(base + (stage < extra) for stage in range(num_stages))


def _fixed(spec: JobSpec, fixed: ParallelismSpec, plan: ParallelPlan | None) -> Iterator[SpecProblem]:
    least, most, unit = spec.elasticity.min_workers, spec.elasticity.max_workers, fixed.unit
    fitting = _fitting_world(fixed, least, most)
    if fitting is None:
        # problems of the degrees come first: with them, more workers would not help
        alone = fixed_layout(fixed, unit * (fixed.ep if fixed.dp_shard == "auto" else 1), plan)
        wrong = tuple(_broken(alone, spec, plan)) if alone is not None else ()
        yield from wrong or [SpecProblem(path="parallelism", message=_no_world(fixed, least, most))]
        return
    layout = fixed_layout(fixed, fitting, plan)
    assert layout is not None
    yield from _broken(layout, spec, plan)
    if fixed.otherwise == "idle" and least < unit:
        yield SpecProblem(
            path="parallelism.otherwise",
            message=f"parallelism.otherwise is idle, but elasticity.min_workers {least} is fewer than the {unit} that "
            f"the degrees need ({_product(fixed)}): with {_workers(least)} the job could not run. Set min_workers to "
            f"{unit}, or otherwise to replan.",
        )


def _fitting_world(fixed: ParallelismSpec, least: int, most: int) -> int | None:
    """Return the smallest allowed world size that the degrees fit, preferably one with a dp_shard that ep divides; None
    if they fit none."""
    if fixed.dp_shard != "auto":
        return fixed.unit if least <= fixed.unit <= most else None
    for step in (fixed.unit * fixed.ep, fixed.unit):
        world = -(-least // step) * step
        if world <= most:
            return world
    return None


def _broken(layout: Layout, spec: JobSpec, plan: ParallelPlan | None) -> Iterator[SpecProblem]:
    for violation in violations(layout, spec, plan):
        yield SpecProblem(path=f"parallelism.{violation.axis}", message=f"{violation.message} ({violation.rule})")


def _no_world(fixed: ParallelismSpec, least: int, most: int) -> str:
    unit = fixed.unit
    allowed = f"elasticity allows {least} to {most}"
    if fixed.dp_shard != "auto":
        setting = "max_workers" if most < unit else "min_workers"
        return (
            f"parallelism fixes {_product(fixed)} = {unit} workers, but {allowed} workers. "
            f'Set {setting} to {unit}, or dp_shard to "auto".'
        )
    below, above = least // unit * unit, -(-least // unit) * unit
    choices = " or ".join(str(n) for n in (below, above) if n)
    return (
        f"parallelism needs a multiple of {_product(fixed)} = {unit} workers, but {allowed} workers, which contains "
        f"none. Set max_workers to {choices}, or use smaller degrees."
    )


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


def _product(fixed: ParallelismSpec) -> str:
    degrees = {"pp": fixed.pp, "dp_replicate": fixed.dp_replicate, "cp": fixed.cp, "tp": fixed.tp}
    if fixed.dp_shard != "auto":
        degrees["dp_shard"] = fixed.dp_shard
    return " x ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1) or "dp_shard 1"


def _most_workers(spec: JobSpec, fixed: ParallelismSpec | None, plan: ParallelPlan | None) -> Iterator[SpecProblem]:
    """A problem if max_workers has no layout: a worker would be reserved that can never have work."""
    most, micro_batches = spec.elasticity.max_workers, spec.batch.num_micro_batches
    if most <= micro_batches:
        return
    if fixed is not None:
        layout = fixed_layout(fixed, most, plan)
        if fixed.otherwise == "idle" or (layout is not None and not violations(layout, spec, plan)):
            return
    degrees = legal_degrees(spec, plan).model_degrees()
    if _has_layout(most, micro_batches, degrees):
        return
    nearest = min(most, micro_batches * degrees[-1])
    while not _has_layout(nearest, micro_batches, degrees):
        nearest -= 1
    batch = f"batch.global_size {spec.batch.global_size} / batch.micro_size {spec.batch.micro_size}"
    idle = f"{_workers(most - nearest)} would have nothing to do"
    if degrees == (1,):
        message = (
            f"elasticity.max_workers {most} is more than the {micro_batches} micro-batches a step ({batch}): {idle}. "
            f"Lower max_workers to {nearest}, or use more and smaller micro-batches."
        )
    else:
        message = (
            f"elasticity.max_workers {most} has no layout: it is not a product of at most {micro_batches} data ranks "
            f"(micro-batches a step: {batch}) and degrees of tp, cp and pp that the model allows (at most "
            f"{degrees[-1]} together): {idle}. Lower max_workers to {nearest}, or use more and smaller micro-batches."
        )
    yield SpecProblem(path="elasticity.max_workers", message=message)


def _has_layout(world_size: int, micro_batches: int, degrees: tuple[int, ...]) -> bool:
    return any(world_size % n == 0 and world_size // n <= micro_batches for n in degrees)
