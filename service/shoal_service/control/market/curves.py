"""CurveBook: the throughput curve of each job, predicted by the planner and corrected by what was measured.

    predicted   the planner's best layout at some world sizes; without it (a user task) the batch's partition decides
    corrected   at a size that was measured, its measurement; at the others, the prediction times what the nearest
                measured size was off by

A predicted curve rises by at least 1 % per worker: what no other job needs is used even if the planner sees no gain,
since it may be wrong. A measured curve may fall.

A prediction takes about 3 ms per size, so only a few jobs are predicted per pass, and jobs of equal specs share one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

from shoal_service.control.hardware_profiles import measured_profile
from shoal_service.core.scheduling.market import ThroughputCurve
from shoal_service.planner import HardwareProfile, rank
from shoal_workers.contract.spec import JobSpec

_DECIDES = {"task", "model", "data", "batch", "precision", "parallelism", "plan", "worker", "deterministic"}
"""The keys of a spec that a prediction depends on, besides the world sizes."""
_FEW = 8
"""Up to this world size, each size is predicted."""
_REMEMBERED = 4096
_LEAST_GAIN = 1.01
_DOUBLING = 0.95
"""Speed-up of a doubling of the workers, relative to the ideal one, that is assumed of a task of unknown sizes."""


class CurveBook:
    """Predicted curves by spec. Not thread-safe: one pass at a time asks."""

    def __init__(self, profiles: tuple[HardwareProfile, ...]) -> None:
        self._profiles = profiles
        self._predicted: OrderedDict[str, ThroughputCurve] = OrderedDict()

    def predicted(self, spec: JobSpec, *, may_compute: bool) -> ThroughputCurve | None:
        """None: it has to be computed, and `may_compute` forbids that now."""
        key = f"{spec.elasticity.max_workers} {spec.model_dump_json(include=_DECIDES)}"
        if key in self._predicted:
            self._predicted.move_to_end(key)
            return self._predicted[key]
        if not may_compute:
            return None
        profile = measured_profile(self._profiles, has_gpu=spec.worker.gpus > 0)
        self._predicted[key] = predict(spec, profile)
        if len(self._predicted) > _REMEMBERED:
            self._predicted.popitem(last=False)
        return self._predicted[key]


def predict(spec: JobSpec, profile: HardwareProfile | None = None) -> ThroughputCurve:
    """Samples per second by world size, as the planner expects them."""
    rates = {}
    for size in sizes_of(spec.elasticity.max_workers):
        best = rank(spec, size, profile, 1).predictions
        if not best:
            continue  # no layout uses exactly this many workers, or the sizes of the model are unknown
        rates[size] = spec.batch.global_size / best[0].step_s
    return curve_of(rising(rates)) if rates else by_partition(spec)


def by_partition(spec: JobSpec) -> ThroughputCurve:
    """For a task of which the planner knows nothing: a step takes as long as the rank with the most micro-batches."""
    micro_batches = spec.batch.num_micro_batches
    return curve_of(
        rising(
            {
                size: spec.batch.global_size / math.ceil(micro_batches / size) * _DOUBLING ** math.log2(size)
                for size in sizes_of(spec.elasticity.max_workers)
            }
        )
    )


def rising(rates: Mapping[int, float]) -> dict[int, float]:
    """The rates, of which none is lower than that of a smaller size, and a bit more per worker."""
    found: dict[int, float] = {}
    least, before = 0.0, 0
    for size in sorted(rates):
        found[size] = max(rates[size], least * _LEAST_GAIN ** (size - before))
        least, before = found[size], size
    return found


def corrected(curve: ThroughputCurve, measured: Mapping[int, float]) -> ThroughputCurve:
    """`measured`: samples per second by world size."""
    if not measured:
        return curve
    off_by = {size: rate / curve.rate(size) for size, rate in measured.items()}
    rates = dict(measured)
    for size, rate in zip(curve.sizes, curve.rates, strict=True):
        nearest = min(off_by, key=lambda known: (abs(math.log(known / size)), known))
        rates.setdefault(size, rate * off_by[nearest])
    return curve_of(rates)


def curve_of(rates: Mapping[int, float]) -> ThroughputCurve:
    sizes = sorted(rates)
    return ThroughputCurve(tuple(sizes), tuple(rates[size] for size in sizes))


def sizes_of(most: int) -> list[int]:
    """The world sizes at which a curve is predicted: small ones, then powers of two, then the largest."""
    doubled = [1 << bits for bits in range(_FEW.bit_length(), most.bit_length())]
    return sorted({*range(1, min(most, _FEW) + 1), *doubled, most})
