"""Checks at submission that a job's parallelism fits the numbers of workers that it allows.

Pure. Called by `spec_errors.parse_spec`. It does not estimate memory; the planner does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal_workers.contract.checks.legality import violations
from shoal_workers.contract.layout import ContextMethod, Layout, Recompute, Schedule, ShardLevel
from shoal_workers.contract.model.plan import ParallelPlan
from shoal_workers.contract.model.plan_of import plan_of
from shoal_workers.contract.spec import JobSpec, ParallelismSpec

_MAX_DEGREE = 4096
"""Largest degree of one axis that is considered."""


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A setting with which no layout exists, whatever the planner chooses."""

    path: str
    message: str


@dataclass(frozen=True, slots=True)
class LegalDegrees:
    """Degrees of each axis that break no rule while the others are 1, ascending."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    ep: tuple[int, ...]
    seq_len: int = 0

    def together(self, tp: int, cp: int) -> bool:
        """Whether tp divides the tokens that each cp rank has of a sequence."""
        return self.seq_len // cp % tp == 0

    def model_degrees(self) -> tuple[int, ...]:
        """All products tp x cp x pp, ascending."""
        within = {tp * cp for tp in self.tp for cp in self.cp if self.together(tp, cp)}
        return tuple(sorted({part * pp for part in within for pp in self.pp}))


def infeasible(spec: JobSpec) -> tuple[Infeasible, ...]:
    """All problems; (): every world size from min_workers to max_workers has a layout, possibly with idle ranks."""
    plan = plan_of(spec)
    fixed = spec.parallelism if isinstance(spec.parallelism, ParallelismSpec) else None
    found = list(_fixed(spec, fixed, plan)) if fixed is not None else []
    return tuple(found) or tuple(_most_workers(spec, fixed, plan))


def legal_degrees(spec: JobSpec, plan: ParallelPlan | None) -> LegalDegrees:
    """The legal degrees of each axis while the others are 1 (for ep: while dp_shard is large enough)."""
    if plan is None:
        return LegalDegrees((1,), (1,), (1,), (1,))
    sizes = [n for n in (plan.num_heads, plan.num_kv_heads, *plan.widths.values(), plan.seq_len) if n]
    one = spec.model_copy(update={"batch": spec.batch.model_copy(update={"global_size": spec.batch.micro_size})})

    def legal(axis: str, candidates: Iterable[int]) -> tuple[int, ...]:
        layouts = (Layout.model_validate({axis: n, "schedule": Schedule.GPIPE}) for n in candidates)
        return tuple(getattr(x, axis) for x in layouts if not violations(x, one, plan)) or (1,)

    ep = tuple(_divisors(plan.num_experts)) if plan.experts and not spec.deterministic else ()
    return LegalDegrees(
        tp=legal("tp", _divisors(min(sizes)) if sizes else range(1, _MAX_DEGREE + 1)),
        cp=legal("cp", _divisors(plan.seq_len // 2)),
        pp=legal("pp", range(1, min(plan.num_blocks, _MAX_DEGREE) + 1)),
        ep=ep or (1,),
        seq_len=plan.seq_len,
    )


def _divisors(size: int) -> Iterator[int]:
    return (n for n in range(1, min(size, _MAX_DEGREE) + 1) if size % n == 0)


def fixed_layout(fixed: ParallelismSpec, world_size: int, plan: ParallelPlan | None) -> Layout | None:
    """The layout of fixed degrees at a world size; None: the world size is not their product. Settings that are "auto"
    get the choice that is always legal."""
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


def even_stages(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Number of blocks of each stage; earlier stages have one more. 0 for some if there are more stages than blocks."""
    base, extra = divmod(num_blocks, num_stages)
    return tuple(base + (stage < extra) for stage in range(num_stages))


def _fixed(spec: JobSpec, fixed: ParallelismSpec, plan: ParallelPlan | None) -> Iterator[Infeasible]:
    least, most, unit = spec.elasticity.min_workers, spec.elasticity.max_workers, fixed.unit
    fitting = _fitting_world(fixed, least, most)
    if fitting is None:
        # problems of the degrees come first: with them, more workers would not help
        alone = fixed_layout(fixed, unit * (fixed.ep if fixed.dp_shard == "auto" else 1), plan)
        wrong = tuple(_broken(alone, spec, plan)) if alone is not None else ()
        yield from wrong or (Infeasible("parallelism", _no_world(fixed, least, most)),)
        return
    layout = fixed_layout(fixed, fitting, plan)
    assert layout is not None
    yield from _broken(layout, spec, plan)
    if fixed.otherwise == "idle" and least < unit:
        yield Infeasible(
            "parallelism.otherwise",
            f"parallelism.otherwise is idle, but elasticity.min_workers {least} is fewer than the {unit} that the "
            f"degrees need ({_product(fixed)}): with {_workers(least)} the job could not run. Set min_workers "
            f"to {unit}, or otherwise to replan.",
        )


def _fitting_world(fixed: ParallelismSpec, least: int, most: int) -> int | None:
    """The smallest allowed world size that the degrees fit; preferably one with a dp_shard that ep divides."""
    if fixed.dp_shard != "auto":
        return fixed.unit if least <= fixed.unit <= most else None
    for step in (fixed.unit * fixed.ep, fixed.unit):
        world = -(-least // step) * step
        if world <= most:
            return world
    return None


def _broken(layout: Layout, spec: JobSpec, plan: ParallelPlan | None) -> Iterator[Infeasible]:
    for violation in violations(layout, spec, plan):
        yield Infeasible(f"parallelism.{violation.axis}", f"{violation.message} ({violation.rule})")


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


def _most_workers(spec: JobSpec, fixed: ParallelismSpec | None, plan: ParallelPlan | None) -> Iterator[Infeasible]:
    """Checks that max_workers has a layout, so that no worker is reserved that can never have work."""
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
    yield Infeasible("elasticity.max_workers", message)


def _has_layout(world_size: int, micro_batches: int, degrees: tuple[int, ...]) -> bool:
    return any(world_size % n == 0 and world_size // n <= micro_batches for n in degrees)
