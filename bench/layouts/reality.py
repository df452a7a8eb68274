"""The planner against this machine: layouts are run, and their memory and step time are compared with the prediction.

memory      of a larger model during step 2, in processes that return freed memory to the kernel (tensor_pages.py). The
            prediction is taken without its reserved part, the memory of a process before its first tensor. The first
            generation of a process does not count
seconds     median of the timed steps, in other processes
profile     measured immediately before, as `shoal profile` does; the planner adds the cuts of pipelines
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layouts.cases import COUNTED_MODEL, TIMED_MODEL, Fixed, Model, parallelism, spec_of, world_of
from layouts.pool import WorkerPool
from layouts.rank import WARM_UP_STEPS
from shoal_service.planner import HardwareProfile, rank
from shoal_service.planner.memory import BytesPart
from shoal_service.planner.ranking import Prediction
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout, Recompute

MEMORY_WITHIN = 0.10
LEAST_CORRELATION = 0.8
BEST_WITHIN = 0.15
_COUNTED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Compared:
    """Prediction and measurement of one layout."""

    name: str
    world_size: int
    predicted_bytes: int
    """Predicted memory without the reserved part."""
    measured_bytes: int
    predicted_state_bytes: int
    """Parameters and optimizer state."""
    measured_state_bytes: int
    """Measured memory between two steps."""
    predicted_s: float
    measured_s: float | None
    predicted_parts: dict[str, int]

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def compare(
    cases: Sequence[Fixed],
    profile: HardwareProfile,
    folder: Path,
    say: Callable[[str], None],
    *,
    timed_steps: int,
) -> list[Compared]:
    """Runs each layout. With 0 timed steps only memory is measured."""
    predictions = [predict(fixed, profile, COUNTED_MODEL) for fixed in cases]
    order = sorted(range(len(cases)), key=lambda place: world_of(cases[place]))
    peaks: dict[int, tuple[int, int]] = {}
    counting = WorkerPool(spec_of(COUNTED_MODEL, steps=_COUNTED_STEPS), folder / "counting", counts=True)
    try:
        for place in order:
            layout = predictions[place].layout
            if layout.world_size > counting.num_ranks:
                counting.train(layout)  # new processes create what is created once
            run = counting.train(layout)
            peaks[place] = run.peak_bytes, run.rest_bytes
            say(f"{short_name(predictions[place].layout)}: {run.peak_bytes / 2**20:.1f} MiB")
    finally:
        counting.close()
    timed = [predict(fixed, profile, TIMED_MODEL) for fixed in cases]
    seconds = _seconds([p.layout for p in timed], order, folder, say, timed_steps) if timed_steps else {}
    return [
        _compared(prediction, world_of(cases[place]), *peaks[place], timed[place].step_s, seconds.get(place))
        for place, prediction in enumerate(predictions)
    ]


def predict(fixed: Fixed, profile: HardwareProfile, model: Model) -> Prediction:
    """Predicts this layout. The planner chooses only what the case leaves open: the cuts of a pipeline."""
    spec = parse_spec(spec_of(model, steps=1, parallelism=parallelism(fixed)))
    found = rank(spec, world_of(fixed), profile, top=1)
    if not found.predictions:
        raise ValueError(f"parallelism {fixed} has no legal layout: {found.note}")
    return found.predictions[0]


def summary(compared: Sequence[Compared]) -> dict[str, Any]:
    """Makes the summary that is written as JSON."""
    timed = [(one.predicted_s, one.measured_s) for one in compared if one.measured_s is not None]
    errors = [abs(one.memory_error) for one in compared]
    document: dict[str, Any] = {
        "layouts": [{**asdict(one), "memory_error": round(one.memory_error, 4)} for one in compared],
        "memory_error_largest": max(errors),
        "memory_error_median": statistics.median(errors),
        "memory_within": MEMORY_WITHIN,
    }
    if timed:
        predicted, measured = zip(*timed, strict=True)
        chosen = measured[predicted.index(min(predicted))]
        document |= {
            "spearman": spearman(predicted, measured),
            "least_spearman": LEAST_CORRELATION,
            "best_predicted_over_best_measured": chosen / min(measured),
            "best_within": 1 + BEST_WITHIN,
        }
    document["passed"] = max(errors) <= MEMORY_WITHIN and (
        not timed
        or (
            document["spearman"] >= LEAST_CORRELATION
            and document["best_predicted_over_best_measured"] <= 1 + BEST_WITHIN
        )
    )
    return document


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation (Spearman 1904): Pearson's correlation of the ranks; equal values get the mean of their
    ranks."""
    return statistics.correlation(_ranks(first), _ranks(second))


def short_name(layout: Layout) -> str:
    """The layout in words, with the choices that distinguish layouts of equal degrees."""
    words = [layout.describe()]
    words += [str(layout.schedule)] if layout.pp > 1 else []
    words += [str(layout.shard)] if layout.pp == 1 and layout.dp_shard > 1 else []
    words += [f"recompute {layout.recompute}"] if layout.recompute is not Recompute.NONE else []
    words += ["offload"] if layout.offload else []
    return ", ".join(words)


def _seconds(
    layouts: Sequence[Layout], order: Sequence[int], folder: Path, say: Callable[[str], None], timed_steps: int
) -> dict[int, float]:
    found = {}
    timing = WorkerPool(spec_of(TIMED_MODEL, steps=WARM_UP_STEPS + timed_steps), folder / "timing", counts=False)
    try:
        for place in order:
            found[place] = timing.train(layouts[place]).step_s
            say(f"{short_name(layouts[place])}: {found[place]:.3f} s")
    finally:
        timing.close()
    return found


def _compared(
    prediction: Prediction,
    world_size: int,
    peak_bytes: int,
    rest_bytes: int,
    predicted_s: float,
    measured_s: float | None,
) -> Compared:
    parts = prediction.bytes
    return Compared(
        name=short_name(prediction.layout),
        world_size=world_size,
        predicted_bytes=prediction.memory_bytes - parts[BytesPart.RESERVED],
        measured_bytes=peak_bytes,
        predicted_state_bytes=parts[BytesPart.PARAMETERS] + parts[BytesPart.OPTIMIZER],
        measured_state_bytes=rest_bytes,
        predicted_s=predicted_s,
        measured_s=measured_s,
        predicted_parts={str(part): size for part, size in parts.items()},
    )


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - ordered[::-1].index(value) - 1) / 2 for value in values]
