"""What a worker reserves, on which nodes a job may run, and by when it should be done: these keys of a spec, and their
validation. Imported by `spec`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from shoal_workers.contract.base import if_set, whole
from shoal_workers.contract.rules import Rule, Section

GPU_TYPE_LABEL = "ray.io/accelerator-type"
MARKET_TYPE_LABEL = "ray.io/market-type"
SPOT = "spot"
"""Value of MARKET_TYPE_LABEL on nodes that may be taken away at any time."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._@-]{0,61}[A-Za-z0-9])?")
_NODE_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")
_MAX_LABELS = 16
_LATEST = 253_402_300_799.0
"""End of the year 9999, the last that ISO 8601 writes with four digits, in seconds since the epoch."""


ANY_CLUSTER = "any"
CLUSTER_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
"""Pattern of the names of clusters; the same as for names in Kubernetes."""


class CapacityKind(StrEnum):
    """On which nodes a job may run."""

    ANY = "any"
    SPOT = "spot"
    ON_DEMAND = "on_demand"


class Placement(StrEnum):
    """How a job's workers are spread over nodes."""

    PACK = "pack"
    SPREAD = "spread"


class WorkerSpec(Section):
    """What one worker reserves."""

    cpus: float = Field(1.0, ge=0, le=4096, allow_inf_nan=False)
    """CPU cores; a fraction shares a core with other workers."""
    gpus: int = Field(0, ge=0, le=1)
    """0: gloo on CPU. 1: NCCL on one GPU."""
    memory_gib: float = Field(0.0, ge=0, le=65536, allow_inf_nan=False)
    """Memory reserved in the cluster's scheduler, GiB; 0: not reserved."""
    gpu_type: str | None = Field(None, min_length=1, max_length=63)
    """Only nodes with GPUs of this type, as Ray's label `ray.io/accelerator-type` names it, for example H100."""
    cluster: str = Field(ANY_CLUSTER, pattern=CLUSTER_PATTERN)
    """Only this cluster, by the name with which it has joined; `any`: the one that the scheduler chooses. A job never
    spans clusters."""
    selector: dict[str, str] = Field(
        default_factory=dict,
        json_schema_extra={
            "maxProperties": _MAX_LABELS,
            "propertyNames": {"pattern": whole(_NODE_LABEL.pattern)},
            "additionalProperties": {"type": "string", "pattern": whole(_NODE_LABEL.pattern)},
        },
    )
    """Only nodes with all of these labels (`ray start --labels`)."""

    @field_validator("selector")
    @classmethod
    def _labels(cls, labels: dict[str, str]) -> dict[str, str]:
        return check_labels(labels)

    rules = (
        Rule(
            lambda worker: worker.gpu_type is not None and not worker.gpus,
            lambda worker: f"worker.gpu_type is {worker.gpu_type}, but worker.gpus is 0. Set worker.gpus to 1.",
            if_set("gpu_type", {"required": ["gpus"], "properties": {"gpus": {"const": 1}}}),
        ),
    )

    @property
    def node_labels(self) -> dict[str, str]:
        """The labels that a node must have to run a worker."""
        return self.selector | ({} if self.gpu_type is None else {GPU_TYPE_LABEL: self.gpu_type})


def label_selector(labels: Mapping[str, str], capacity: CapacityKind) -> dict[str, str]:
    """Ray's `label_selector` for a worker: its node has all of `labels`, and is of this capacity."""
    if capacity is CapacityKind.ANY:
        return dict(labels)
    return {**labels, MARKET_TYPE_LABEL: SPOT if capacity is CapacityKind.SPOT else f"!in({SPOT})"}


def is_label(text: str) -> bool:
    """Return whether the text can name a project or a receiver of events: at most 63 lower-case letters, digits and
    inner dashes."""
    return _LABEL.fullmatch(text) is not None


def is_job_name(text: str) -> bool:
    """Return whether the text can name a job: at most 63 letters, digits, and inner dashes, dots and underscores. The
    names of labels are made of the same characters."""
    return _LABEL_NAME.fullmatch(text) is not None


def is_user(text: str) -> bool:
    """Return whether the text can name a user: at most 63 letters, digits, and inner dashes, dots, underscores and at
    signs."""
    return _USER.fullmatch(text) is not None


def check_labels(labels: dict[str, str]) -> dict[str, str]:
    """Return the labels. Raises ValueError if there are too many, or one that no node can have."""
    if len(labels) > _MAX_LABELS:
        raise ValueError(f"{len(labels)} labels are too many: use at most {_MAX_LABELS}.")
    for text in (*labels, *labels.values()):
        if not _NODE_LABEL.fullmatch(text):
            raise ValueError(
                f"{text[:80]!r} is not valid in a label of a node: use at most 128 letters, digits, and inner dashes, "
                "dots, slashes and underscores."
            )
    return labels


def moment(value: Any) -> Any:
    """Seconds since the epoch of an ISO 8601 time with its zone; a number remains as it is.

    Raises:
        ValueError: the value is not a time, or has no zone.
    """
    if isinstance(value, str):
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(
                f'{value[:80]!r} is not a time: write it as in "2030-01-31T18:00:00+00:00", or as seconds since 1970.'
            ) from None
        if at.tzinfo is None:
            raise ValueError(f'{value[:80]!r} has no time zone: add it, for example "Z" for UTC or "+02:00".')
        return at.timestamp()
    if isinstance(value, bool) or (isinstance(value, int | float) and not 0 < value <= _LATEST):
        raise ValueError(f"{value} is not a number of seconds since 1970.")
    return value


Moment = Annotated[float, BeforeValidator(moment, json_schema_input_type=float | str)]
"""A time in seconds since the epoch; an ISO 8601 time with its zone is accepted too."""


_MAX_ANNOTATION = 4096
LABEL, JOB_NAME, USER = (whole(rule.pattern) for rule in (_LABEL, _LABEL_NAME, _USER))
"""Patterns for a JSON Schema: what `is_label`, `is_job_name` and `is_user` accept."""


def _check_texts(kind: str, most: int, characters: str, others: str = "") -> AfterValidator:
    """Make the validator of texts by name. `others`: characters that a text may have besides the printable ones."""

    def check(texts: dict[str, str]) -> dict[str, str]:
        for name, text in texts.items():
            if not _LABEL_NAME.fullmatch(name):
                raise ValueError(f"{kind} {name[:80]!r}: a name has at most 63 letters, digits and inner . _ -.")
            if len(text) > most or not all(char.isprintable() or char in others for char in text):
                raise ValueError(f"{kind} {name!r}: a value has at most {most} {characters}.")
        return texts

    return AfterValidator(check)


_NAMES = {"propertyNames": {"pattern": whole(_LABEL_NAME.pattern)}}
JobLabels = Annotated[
    dict[str, str],
    _check_texts("label", 255, "printable characters"),
    Field(json_schema_extra={**_NAMES, "additionalProperties": {"type": "string", "maxLength": 255}}),
]
"""Names and values that a user gives a job, to find and to compare jobs."""
Annotations = Annotated[
    dict[str, str],
    _check_texts("annotation", _MAX_ANNOTATION, "characters of text", "\n\t"),
    Field(json_schema_extra={**_NAMES, "additionalProperties": {"type": "string", "maxLength": _MAX_ANNOTATION}}),
]
"""Names and free texts that a user gives a job; nothing is decided by them."""
