"""Which layouts the matrices train, on which tiny models.

    products     every (pp, dp_replicate, dp_shard, cp, tp, ep) of a world that the legality rules allow
    variants     for each product, as many as its longest list of choices: every schedule of a pipeline, every level of
                 sharding, every context method; recomputation varies with them. The lists have different lengths, so
                 that over the matrix each choice is combined with each other. Experts on 8 ranks: two variants
    typical      for both models: each axis alone, each pair of axes, each schedule
    sample       of the typical ones each axis alone, each schedule, and a seventh of the others, for `make test`; and
                 plain replicas, which jobs on CPUs have by default

All degrees up to 8, also 3, divide the models' sizes, except for the vocabulary (257), which none divides. They
are as shallow as the pipeline allows, and a step has as few micro-batches as ranks and schedule allow, since eight
processes share two cores. The deep model is for pipelines of 4 and 8 ranks only.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal_workers.contract.checks.legality import violations
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.layout import ContextMethod, Layout, Recompute, Schedule, ShardLevel, plain
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.spec import JobSpec, plan_of

WORLDS = (1, 2, 3, 4, 8)
STEPS = 5
_SIZES = (3, 5, 8)
"""Micro-batches of a step, of one sample each. 3 and 5 are partitioned unevenly to 2, 3 and 4 ranks."""
_UNCUT_LAYERS = 2
"""Without a pipeline: a dense block, and one with experts."""
_SPEC: dict[str, Any] = {
    "task": LM_TASK,
    "batch": {"global_size": _SIZES[-1], "micro_size": 1},
    "optimizer": {"lr": 0.002, "clip_norm": 1.0},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 5},
    "elasticity": {"max_workers": 8},
    "snapshot": {"enabled": False},
    "seed": 3,
}
_DENSE = {"dim": 48, "num_layers": 4, "num_heads": 24, "hidden_dim": 96, "seq_len": 48}
_DEEP = {**_DENSE, "num_layers": 8}
_EXPERTS = {
    "dim": 48,
    "num_layers": 4,
    "num_heads": 24,
    "hidden_dim": 96,
    "seq_len": 48,
    "tied_head": False,
    "num_experts": 24,
    "top_k": 2,
    "num_shared_experts": 1,
    "num_dense_layers": 1,
    "expert_hidden_dim": 24,
}
MODELS: dict[str, dict[str, Any]] = {"dense": _DENSE, "deep": _DEEP, "experts": _EXPERTS}
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    model: str
    layout: Layout
    precision: str = "fp32"

    @property
    def global_size(self) -> int:
        """The smallest that gives every data rank a micro-batch, and the schedule enough."""
        ranks = self.layout.dp_replicate * self.layout.dp_shard
        return next(size for size in _SIZES if size >= ranks and is_legal(self.model, self.layout, size))

    @property
    def num_layers(self) -> int:
        layers: int = MODELS[self.model]["num_layers"]
        return layers if self.layout.pp > 1 else _UNCUT_LAYERS

    def spec(self, text: str, **changes: Any) -> dict[str, Any]:
        """What the service would be sent."""
        spec = spec_of(self.model, text, batch={"global_size": self.global_size, "micro_size": 1}, **changes)
        spec["model"] = {**spec["model"], "num_layers": self.num_layers}
        return spec

    @property
    def name(self) -> str:
        layout = self.layout
        words = [self.model, layout.describe().replace(" ", "")]
        words += [layout.schedule.value, "-".join(map(str, layout.stages))] if layout.pp > 1 else []
        words += [layout.shard.value] if layout.dp_shard > 1 or layout.shard is ShardLevel.NONE else []
        words += [layout.context.value] if layout.cp > 1 else []
        words += [f"recompute_{layout.recompute}"] if layout.recompute is not Recompute.NONE else []
        words += [self.precision] if self.precision != "fp32" else []
        return " ".join(word for word in words if word)


def spec_of(model: str, text: str, **changes: Any) -> dict[str, Any]:
    """What the service would be sent. `text`: a directory of text files."""
    data = {"paths": [text], "cache_dir": f"{text}-cache", "validation_fraction": 0.3}
    return {**_SPEC, "model": MODELS[model], "data": data, **changes}


def all_cases() -> list[Case]:
    """Every cell, of fp32 and of bf16; those of one model and precision together, for they share processes."""
    cases = [case for model in MODELS for case in _cases(model)]
    known = typical()
    rounded = [Case(case.model, case.layout, "bf16") for case in known if len(_axes(case.layout)) != 1]
    return cases + [case for case in known if case not in cases] + rounded


def sample() -> list[Case]:
    """What every `make test` trains."""
    cases = typical()
    alone: dict[Any, Case] = {}
    for case in cases:
        axes = _axes(case.layout)
        if len(axes) == 1 or axes == {"dp_shard", "ep"}:
            alone.setdefault(axes, case)
    schedules = {case.layout.schedule: case for case in cases if case.layout.pp > 1}
    first = {*alone.values(), *schedules.values()}
    others = [case for case in cases if case not in first]
    whole = [Case(model, plain(3)) for model in ("dense", "experts")]
    return [*sorted(first, key=cases.index), *others[::7], *whole]


def typical() -> list[Case]:
    found = []
    for model in ("dense", "experts"):
        cases = list(_cases(model))
        for desired in _desired(model):
            choices = [case for case in cases if _axes(case.layout) == desired[0] and desired[1](case.layout)]
            fresh = [case for case in choices if case not in found]
            # an odd world size if possible: nothing divides evenly there
            found.append(min(fresh or choices, key=lambda case: (case.layout.world_size, case.layout.describe())))
    alone = {(case.model, _axes(case.layout)): case for case in found if len(_axes(case.layout)) == 1}
    return found + [Case(case.model, case.layout, "bf16") for case in alone.values()]


def _desired(model: str) -> Iterator[Any]:
    """(axes, condition)."""
    axes = _AXES if model == "experts" else _AXES[:-1]
    for number in (1, 2):
        for chosen in itertools.combinations(axes, number):
            names = frozenset(chosen) | ({"dp_shard"} if "ep" in chosen else set())
            yield names, lambda layout: True
    for schedule in Schedule:
        yield frozenset({"pp"}), lambda layout, schedule=schedule: layout.schedule is schedule


def _axes(layout: Layout) -> frozenset[str]:
    return frozenset(axis for axis in _AXES if getattr(layout, axis) > 1)


def _cases(model: str) -> Iterator[Case]:
    for turn, product in enumerate(product for world in WORLDS for product in products(model, world)):
        for layout in _variants(model, product, turn):
            yield Case(model, layout)
    for world in WORLDS if model != "deep" else ():
        yield Case(model, plain(world))


def products(model: str, world: int) -> Iterator[Layout]:
    """Every legal product of degrees, with gpipe's even stages."""
    degrees = [degree for degree in range(1, world + 1) if world % degree == 0]
    for pp, replicate, shard, cp, tp in itertools.product(degrees, repeat=5):
        if pp * replicate * shard * cp * tp == world:
            for ep in degrees:
                layout = Layout(
                    pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, schedule=Schedule.GPIPE
                )
                if is_legal(model, layout) and (pp >= 4 or model != "deep"):
                    yield layout


def is_legal(model: str, layout: Layout, size: int = _SIZES[-1]) -> bool:
    spec, plan = _spec_and_plan(model, size)
    return not violations(layout, spec, plan)


@functools.cache
def _spec_and_plan(model: str, size: int) -> tuple[JobSpec, ParallelPlan | None]:
    spec = parse_spec(spec_of(model, "unused", batch={"global_size": size, "micro_size": 1}))
    return spec, plan_of(spec)


def _variants(model: str, product: Layout, turn: int) -> Iterator[Layout]:
    num_layers = MODELS[model]["num_layers"]
    pipelines = [
        {"schedule": schedule, "stages": stages}
        for schedule in Schedule
        for stages in [cuts(schedule, product.pp, num_layers, turn)]
        if stages is not None
    ]
    lists: list[list[dict[str, Any]]] = [pipelines] if product.pp > 1 else []
    lists += [[{"shard": level} for level in ShardLevel]] if product.dp_shard > 1 else []
    lists += [[{"context": method} for method in ContextMethod]] if product.cp > 1 else []
    num = max((len(choices) for choices in lists), default=1)
    if model == "experts" and product.world_size == 8:  # six axes: the products alone are many
        num = min(num, 2)
    for index in range(num):
        chosen: dict[str, Any] = {"recompute": list(Recompute)[(index + turn) % 3]}
        for speed, choices in enumerate(lists):
            chosen |= choices[(index + (speed + 1) * turn) % len(choices)]
        layout = product.model_copy(update=chosen)
        if not is_legal(model, layout):  # Ulysses has more requirements than the other method
            layout = layout.model_copy(update={"context": ContextMethod.ALL_GATHER})
        if is_legal(model, layout):
            yield layout


def cuts(schedule: Schedule, pp: int, num_layers: int, turn: int) -> tuple[int, ...] | None:
    """Blocks of each stage: even ones and uneven ones take turns. None: there are not enough blocks."""
    num = pp if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2 * pp
    if num > num_layers:
        return None
    if turn % 2 == 0 or num == num_layers:
        base, extra = divmod(num_layers, num)
        return tuple(base + (index < extra) for index in range(num))
    return (*(1 for _ in range(num - 1)), num_layers - num + 1)
