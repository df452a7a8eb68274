"""Rules that a layout must satisfy to train a job. Each violation is a sentence with the arithmetic and the way out.

Pure. Called by the submit check (`feasibility`) for degrees that a user fixes, by the planner's tests for all layouts
that the planner enumerates, and by `shoal plan` for layouts that a user requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.layout import ContextMethod, Layout, Schedule
from shoal_workers.contract.model.hf import TIED_BY_DEFAULT, architecture_of, dropout_of, hugging_face_of
from shoal_workers.contract.model.lm import LM_TASK
from shoal_workers.contract.model.plan import ParallelPlan
from shoal_workers.contract.pipeline_feed import MAX_PADDING, longest_share, micro_batches_fed, num_stages
from shoal_workers.contract.spec import JobSpec


class Rule(StrEnum):
    """The rules."""

    WORLD_PRODUCT = "world_product"
    """The product of the degrees is a number of workers that the job allows."""
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
    DROPOUT_NEEDS_DATA_AXES = "dropout_needs_data_axes"
    """Dropout draws one mask per micro-batch; ranks that hold parts of an activation would draw different masks."""


class Violation(Frozen):
    """A rule that a layout breaks."""

    rule: Rule
    axis: str
    """The axis or setting to change: tp, pp, cp, ep, dp_shard, schedule, stages, shard."""
    message: str
    """What is wrong, with the arithmetic and the nearest legal choice."""


def violations(layout: Layout, spec: JobSpec, plan: ParallelPlan | None) -> tuple[Violation, ...]:
    """All rules that the layout breaks; (): the layout is legal."""
    return tuple(_violations(layout, spec, plan))


def _violations(layout: Layout, spec: JobSpec, plan: ParallelPlan | None) -> Iterator[Violation]:
    yield from _deterministic(layout, spec)
    yield from _dropout(layout, spec)
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
        yield from _experts(layout, known)


def _deterministic(layout: Layout, spec: JobSpec) -> Iterator[Violation]:
    if not spec.deterministic:
        return
    for axis in ("pp", "dp_replicate", "cp", "tp", "ep"):
        degree = getattr(layout, axis)
        if degree > 1:
            yield Violation(
                rule=Rule.DETERMINISTIC_NEEDS_DATA_AXES,
                axis=axis,
                message=f"{axis} is {degree}, but deterministic: true sums in one fixed order along dp_shard only. "
                f"Set {axis} to 1, or deterministic to false.",
            )


def _dropout(layout: Layout, spec: JobSpec) -> Iterator[Violation]:
    name, dropout = "dropout", spec.model.get("dropout", 0) if spec.task == LM_TASK else 0
    if (hugging_face := hugging_face_of(spec.task, spec.model)) is not None:
        name, dropout = dropout_of(hugging_face) or (name, 0)
    if not dropout:
        return
    for axis in ("tp", "cp", "pp"):
        degree = getattr(layout, axis)
        if degree > 1:
            yield Violation(
                rule=Rule.DROPOUT_NEEDS_DATA_AXES,
                axis=axis,
                message=f"{axis} is {degree}, but model.{name} {dropout} draws its masks per micro-batch, which is "
                f"exact on the data axes only. Set {axis} to 1, or model.{name} to 0.",
            )


def _data_ranks(layout: Layout, spec: JobSpec) -> Iterator[Violation]:
    have, ranks = spec.batch.num_micro_batches, layout.num_data_ranks
    if ranks > have:
        yield Violation(
            rule=Rule.MICRO_BATCHES_FILL_RANKS,
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
"""What each axis needs to know of a model."""


def _missing_plan(layout: Layout, spec: JobSpec, plan: ParallelPlan | None) -> Iterator[Violation]:
    for axis, (section, is_there) in _SECTIONS.items():
        degree = getattr(layout, axis)
        if degree == 1 or (plan is not None and is_there(plan)):
            continue
        why = f"task {spec.task!r} declares no plan" if plan is None else f"the plan has no {section}"
        hugging_face = hugging_face_of(spec.task, spec.model) if spec.plan is None else None
        if hugging_face is not None:
            yield _architecture(axis, degree, architecture_of(hugging_face))
            continue
        yield Violation(
            rule=Rule.NEEDS_PLAN,
            axis=axis,
            message=f"{axis} is {degree}, but {why}, which says how the model may be split. Set {axis} to 1, or "
            f"declare plan.{section.replace(', ', ', plan.').replace(' and ', ' and plan.')} (docs/parallelism.md).",
        )


def _architecture(axis: str, degree: int, architecture: str) -> Violation:
    """A Hugging Face model whose architecture Shoal cannot split along this axis."""
    name = f"the architecture {architecture!r}" if architecture else "this model"
    known = "none has" if axis == "cp" else f"these have: {', '.join(sorted(TIED_BY_DEFAULT))}"
    return Violation(
        rule=Rule.NEEDS_PLAN,
        axis=axis,
        message=f"{axis} is {degree}, but {name} has no plan for {axis} ({known}). Set {axis} to 1, or declare a plan "
        "(docs/parallelism.md).",
    )


def _tensor(layout: Layout, plan: ParallelPlan) -> Iterator[Violation]:
    sizes = [
        (Rule.HEADS_DIVISIBLE, "the number of attention heads,", plan.num_heads),
        (Rule.KV_HEADS_DIVISIBLE, "the number of key and value heads,", plan.num_kv_heads),
        *((Rule.WIDTH_DIVISIBLE, name, size) for name, size in plan.widths.items()),
    ]
    for rule, name, size in sizes:
        if rule is Rule.KV_HEADS_DIVISIBLE and plan.num_heads % layout.tp:
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
            rule=Rule.SEQUENCE_DIVISIBLE,
            axis="cp",
            message=f"cp {cp} splits a sequence into 2 x {cp} = {2 * cp} pieces, a head and a tail for each rank, but "
            f"{_division(length, 2 * cp)}. {_use('cp', legal)}, or another sequence length.",
        )
    elif tp > 1 and (length // cp) % tp:
        part = length // cp
        yield Violation(
            rule=Rule.SEQUENCE_DIVISIBLE,
            axis="tp",
            message=f"tp {tp} splits the {part} tokens that each rank has of a sequence ({length} / cp {cp}), but "
            f"{_division(part, tp)}. {_use('tp', nearest_divisors(part, tp))}, or another sequence length.",
        )


def _ulysses(layout: Layout, plan: ParallelPlan) -> Iterator[Violation]:
    """If there are too few key and value heads, they are copied, so only the query heads count."""
    left, cp = plan.num_heads // layout.tp, layout.cp
    if plan.num_heads % layout.tp == 0 and left % cp:
        yield Violation(
            rule=Rule.ULYSSES_DIVIDES_HEADS,
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
            rule=Rule.STAGES_FIT_LAYERS,
            axis="pp",
            message=f"{stages} pipeline stages (pp {layout.pp} x {per_rank} on each rank) are more than the {blocks} "
            f"blocks of the model. Use a pp of at most {blocks // per_rank}.",
        )
    elif layout.stages and (sum(layout.stages) != blocks or min(layout.stages) < 1):
        yield Violation(
            rule=Rule.STAGES_FIT_LAYERS,
            axis="stages",
            message=f"stages {list(layout.stages)} hold {sum(layout.stages)} blocks, at least {min(layout.stages)} "
            f"each; the model has {blocks}, and a stage needs at least 1.",
        )
    if layout.schedule.is_v_shaped:
        if stages != 2 * layout.pp:
            yield Violation(
                rule=Rule.V_SCHEDULE_NEEDS_TWO_STAGES_PER_RANK,
                axis="stages",
                message=f"schedule {layout.schedule} runs 2 stages on each rank: pp {layout.pp} needs "
                f"{2 * layout.pp} of them, not {stages}.",
            )
    elif stages % layout.pp or (stages != layout.pp and layout.schedule is not Schedule.INTERLEAVED):
        each = "the same number of stages" if layout.schedule is Schedule.INTERLEAVED else "1 stage"
        yield Violation(
            rule=Rule.STAGES_FIT_SCHEDULE,
            axis="stages",
            message=f"schedule {layout.schedule} runs {each} on each rank, but {_division(stages, layout.pp)}.",
        )


def _pipeline_fed(layout: Layout, spec: JobSpec) -> Iterator[Violation]:
    share = longest_share(layout, spec.batch.num_micro_batches)
    fed = micro_batches_fed(layout, spec.batch.num_micro_batches)
    if fed > MAX_PADDING * share:
        yield Violation(
            rule=Rule.PIPELINE_NEEDS_MICRO_BATCHES,
            axis="pp",
            message=f"the batch is smaller than the pipeline needs: schedule {layout.schedule} with "
            f"{num_stages(layout)} stages runs {fed} micro-batches on each of {layout.num_data_ranks} data ranks, of "
            f"which at most {share} would be real; more than {MAX_PADDING} times the real ones is refused. Use a "
            f"smaller pp, fewer data ranks, a batch.micro_size below {spec.batch.micro_size}, or schedule gpipe.",
        )


def _experts(layout: Layout, plan: ParallelPlan) -> Iterator[Violation]:
    if not plan.experts or not plan.num_experts:
        yield Violation(
            rule=Rule.EP_NEEDS_EXPERTS,
            axis="ep",
            message=f"ep is {layout.ep}, but the model has no known experts. Set ep to 1, or "
            "model.num_experts (a task of your own: plan.experts and plan.num_experts).",
        )
        return
    if plan.num_experts % layout.ep:
        yield Violation(
            rule=Rule.EXPERTS_DIVISIBLE,
            axis="ep",
            message=f"ep {layout.ep} does not divide the {plan.num_experts} experts: "
            f"{_division(plan.num_experts, layout.ep)}. {_use('ep', nearest_divisors(plan.num_experts, layout.ep))}.",
        )
    if layout.dp_shard % layout.ep:
        yield Violation(
            rule=Rule.EP_DIVIDES_DP_SHARD,
            axis="ep",
            message=f"ep {layout.ep} takes its ranks from dp_shard {layout.dp_shard}, but "
            f"{_division(layout.dp_shard, layout.ep)}. {_use('ep', nearest_divisors(layout.dp_shard, layout.ep))}, or "
            f"a dp_shard that is a multiple of {layout.ep}.",
        )


def nearest_divisors(size: int, desired: int) -> tuple[int, ...]:
    """The largest divisor of `size` up to `desired`, and the smallest one from it on, within a distance of `_FAR`."""
    near = min(desired, size)
    below = next((n for n in range(near, max(0, near - _FAR), -1) if size % n == 0), 1)
    above = next((n for n in range(desired, min(size, desired + _FAR) + 1) if size % n == 0), None)
    return (below,) if above is None else (below, above)


_FAR = 4096
"""Limits the search: a number may have 64 bits, and a divisor this far from the request would not help."""


def _use(axis: str, choices: tuple[int, ...]) -> str:
    return f"Use {axis} {' or '.join(str(choice) for choice in dict.fromkeys(choices))}"


def _division(size: int, by: int) -> str:
    return f"{size} = {size // by} x {by} + {size % by}"
