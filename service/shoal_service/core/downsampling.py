"""Fewer points of a long series: means over equal buckets of steps. Pure; the store feeds it the rows of a job."""

from __future__ import annotations

from collections.abc import Iterable

from shoal_workers.contract.base import Frozen


class SeriesPoint(Frozen):
    """One completed step, or (down-sampled) the mean of several."""

    step: int
    at: float
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_s: float
    world_size: int
    generation: int
    val_loss: float | None = None


def bucket_steps(first_step: int, last_step: int, max_points: int) -> int:
    """Steps per bucket, so that first_step..last_step fall into at most `max_points` buckets."""
    assert max_points >= 1 and first_step <= last_step
    return -(-(last_step - first_step + 1) // max_points)


def downsample(points: Iterable[SeriesPoint], *, first_step: int, width: int) -> list[SeriesPoint]:
    """One point per bucket of `width` steps that is not empty; `points` come in ascending step order.

    The values are means; step, time, world size and generation are those of the bucket's last step, so that the last
    point of the series is always the newest step. Reads its input once and keeps one bucket at a time.
    """
    result: list[SeriesPoint] = []
    bucket: list[SeriesPoint] = []
    current = -1
    for point in points:
        index = (point.step - first_step) // width
        if bucket and index != current:
            result.append(_merge(bucket))
            bucket = []
        current = index
        bucket.append(point)
    if bucket:
        result.append(_merge(bucket))
    return result


def _merge(bucket: list[SeriesPoint]) -> SeriesPoint:
    if len(bucket) == 1:
        return bucket[0]
    validated = [point.val_loss for point in bucket if point.val_loss is not None]
    return bucket[-1].model_copy(
        update={
            "loss": _mean([point.loss for point in bucket]),
            "grad_norm": _mean([point.grad_norm for point in bucket]),
            "lr": _mean([point.lr for point in bucket]),
            "tokens_per_s": _mean([point.tokens_per_s for point in bucket]),
            "step_s": _mean([point.step_s for point in bucket]),
            "val_loss": _mean(validated) if validated else None,
        }
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
