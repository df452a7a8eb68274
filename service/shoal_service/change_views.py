"""The bodies of requests that change a job. Pure data, as `views`, which imports them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.placing import CLUSTER_PATTERN, Moment
from shoal_workers.contract.spec import SWEEP_NAME, ParallelismSpec, StopSpec


class ElasticityPatch(Frozen):
    """Changes of the key `elasticity`. Absent keys stay as they are."""

    min_workers: int | None = Field(None, ge=1, le=100_000)
    max_workers: int | None = Field(None, ge=1, le=100_000)
    standby: int | None = Field(None, ge=0, le=1_000)
    wait_s: float | None = Field(None, gt=0, le=30 * 86400, allow_inf_nan=False)


class SchedulePatch(Frozen):
    """Changes of the key `schedule`. Absent keys stay as they are."""

    name: Literal["cosine", "linear", "constant"] | None = None
    warmup_steps: int | None = Field(None, ge=0, le=2**53)
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    steps: int | None = Field(None, ge=1, le=2**53)
    """null: the decay ends with the last step."""


class ValidationPatch(Frozen):
    """Changes of the key `validation`. Absent keys stay as they are."""

    every_steps: int | None = Field(None, ge=1, le=2**53)
    """null: only after the last step."""
    samples: int | None = Field(None, ge=0, le=2**53)
    metric: str | None = Field(None, min_length=1, max_length=63)
    mode: Literal["min", "max"] | None = None
    patience: int | None = Field(None, ge=1, le=2**53)
    """null: never stop early."""
    min_delta: float | None = Field(None, ge=0, allow_inf_nan=False)


class OptimizerPatch(Frozen):
    """Changes of the key `optimizer`."""

    lr: float | None = Field(None, gt=0, le=1e3, allow_inf_nan=False)


class WorkerPatch(Frozen):
    """Changes of the key `worker`."""

    cluster: str = Field(pattern=CLUSTER_PATTERN)
    """Where the job shall run; `any`: the cluster that the scheduler chooses. An attempt elsewhere saves and ends, and
    the job goes on there."""


class CodePatch(Frozen):
    """New code for the job: one of the keys. What the job is named after and its variables stay as they are."""

    working_dir: str | None = Field(None, max_length=4096)
    """A directory. The client packs and uploads it; without a client it is one on the server's machine."""
    archive: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The sha256 of an uploaded archive (`PUT /v1/code/{sha256}`)."""

    @model_validator(mode="after")
    def _is_one(self) -> CodePatch:
        if (self.working_dir is None) == (self.archive is None):
            raise ValueError('code has exactly one of working_dir and archive, for example {"working_dir": "./task"}.')
        return self


class JobPatch(Frozen):
    """Changes of a job's spec. Absent keys stay as they are. Only `labels` and `annotations` of a job that has ended
    can be changed."""

    elasticity: ElasticityPatch | None = None
    parallelism: Literal["auto"] | ParallelismSpec | None = None
    """Replaces all of `parallelism`: keys that are left out get their defaults. A running group takes the new layout
    at its next step boundary."""
    priority: int | None = Field(None, ge=-1000, le=1000)
    finish_by: Moment | None = None
    """A new deadline."""
    stop: StopSpec | None = None
    """Replaces all of `stop`. This key and the next three take effect at the next step boundary, and no step is lost.
    With fewer steps than are done, the job ends there."""
    schedule: SchedulePatch | None = None
    validation: ValidationPatch | None = None
    optimizer: OptimizerPatch | None = None
    code: CodePatch | None = None
    """New code. Workers with it start beside the others and take over at a step boundary. If it fails, or builds
    another model, the job trains on with the code before, which is then that of the spec again."""
    worker: WorkerPatch | None = None
    labels: dict[str, str | None] | None = Field(None, max_length=64)
    """Merged by name; null removes one. The rules for names and values are those of the spec."""
    annotations: dict[str, str | None] | None = Field(None, max_length=64)
    """Merged as labels."""


class ExtendRequest(Frozen):
    """The request to let a job go on to more steps."""

    steps: int = Field(ge=1, le=2**53)
    """Optimizer steps that it is to complete in all."""


class MoveRequest(Frozen):
    """The request to run a job in another cluster."""

    to: str = Field(pattern=CLUSTER_PATTERN)
    """Name of the cluster; `any`: the one that the scheduler chooses, and an attempt stays where it is."""


class SweepRequest(Frozen):
    """The request for a sweep: a job for each combination of the values of a grid, all or none."""

    name: str | None = Field(None, pattern=SWEEP_NAME)
    """Name of the sweep, in its project; null: one is made from the name of the spec. The same request again submits
    nothing twice."""
    spec: dict[str, Any]
    """The job spec that the jobs share. Their names are its name and a number."""
    grid: dict[str, tuple[Any, ...]] = Field(min_length=1, max_length=16)
    """By path of keys (`optimizer.lr`) the values of this key, all different; the last path changes fastest. Text is
    read as in `--set`: "3e-4" is a number, and the job's label has it as it is written."""
    limit: int | None = Field(None, ge=1, le=100_000)
    """`sweep.limit` of each job."""
    prune: Literal["median"] | None = None
    """`sweep.prune` of each job."""
    warmup_steps: int | None = Field(None, ge=1, le=2**53)
    """`sweep.warmup_steps` of each job; null: its default."""
