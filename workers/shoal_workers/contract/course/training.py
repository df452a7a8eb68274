"""The keys `schedule`, `stop` and `validation` of a spec: learning rate and validation over the steps, and the end.

A running job may change them at a step boundary.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from shoal_workers.contract.base import Frozen, exactly_one_of

PositiveInt = Annotated[int, Field(ge=1, le=2**53)]


class ScheduleSpec(Frozen):
    """Learning rate over the steps: linear warm-up, then the named decay until the last step."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up; constant: no decay."""
    warmup_steps: int = Field(10, ge=0, le=2**53)
    """Optimizer steps over which the learning rate rises to its peak."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """The decay ends at this fraction of the peak learning rate."""
    steps: PositiveInt | None = None
    """Optimizer steps until the end of the decay, warm-up included; null: those of `stop`. A job that is extended keeps
    its learning rates up to then only with a value here, or with the constant schedule."""


class StopSpec(Frozen):
    """When training ends. Set exactly one of the three."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("steps", "tokens", "epochs"))

    steps: PositiveInt | None = None
    """Optimizer steps."""
    tokens: PositiveInt | None = None
    """Tokens trained on (samples, if the task has no tokens); rounded up to whole steps."""
    epochs: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)
    """Passes over the training split; rounded up to whole steps."""

    @model_validator(mode="after")
    def _exactly_one(self) -> StopSpec:
        given = [k for k in ("steps", "tokens", "epochs") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                f"stop must contain exactly one of steps, tokens and epochs; it has {' and '.join(given) or 'none'}."
            )
        return self


class ValidationSpec(Frozen):
    """Loss on the validation split, if the task has one."""

    every_steps: PositiveInt | None = None
    """Steps between two validations. There is always one after the last step."""
    samples: int = Field(256, ge=0, le=2**53)
    """Maximum number of samples, from the start of the split; 0: never validate."""
    metric: str = Field("loss", min_length=1, max_length=63)
    """What makes a validation better: the loss, or a metric of the task's own by its name. For `patience` and
    `checkpoint.keep_best`."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller values of `metric` are better, or larger ones."""
    patience: PositiveInt | None = None
    """Stop early after this many validations in a row without an improvement; null: never."""
    min_delta: float = Field(0.0, ge=0, allow_inf_nan=False)
    """An improvement by this much or less does not count for `patience`."""
