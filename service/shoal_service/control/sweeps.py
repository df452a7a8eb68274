"""Sweeps as requests: the specs of their jobs, and their submission, all or none.

Called by the HTTP edge; the command line and the client expand a request for a dry run. The rules of a sweep are in the
specs of its jobs: the scheduler keeps to the limit, the control loop prunes, and neither knows the request.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal_service.change_views import SweepRequest
from shoal_service.control.spec_io import SpecFormat, decode
from shoal_service.control.submission import Surroundings, accepted
from shoal_service.core.sweeps.grid import InvalidGrid, combinations, document_of, labels_of, words
from shoal_service.store import Store
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, parse_spec
from shoal_workers.contract.spec import JobSpec

MAX_TOTAL_BYTES = 16 << 20
"""Size of all specs of a sweep together, at most."""
_MAX_STEM = 50


@dataclass(frozen=True, slots=True)
class Member:
    """A job of a sweep that is not submitted yet."""

    document: dict[str, Any]
    """Document of the job's spec; not yet validated."""
    labels: dict[str, str]
    """Its values."""


def with_name(request: SweepRequest) -> SweepRequest:
    if request.name is not None:
        return request
    return request.model_copy(update={"name": f"{_stem(request)}-{secrets.token_hex(3)}"})


def members(request: SweepRequest) -> list[Member]:
    """The jobs in the order of the grid; the request must have a name. Raises InvalidGrid."""
    texts = {key: tuple(map(_text, values)) for key, values in request.grid.items()}
    for key, found in texts.items():
        if not found or len(set(found)) < len(found):
            raise InvalidGrid(f"grid.{key}: give one value or more, each of them once.")
    chosen = combinations(list(texts.items()))
    size = len(json.dumps(request.spec))
    if size * len(chosen) > MAX_TOTAL_BYTES:
        raise InvalidGrid(
            f"The spec has {size:,} bytes, and the grid {len(chosen):,} combinations: together more than "
            f"{MAX_TOTAL_BYTES >> 20} MiB. Leave values out."
        )
    values = {
        key: dict(zip(texts[key], (_value(key, value) for value in given), strict=True))
        for key, given in request.grid.items()
    }
    rules = {"limit": request.limit, "prune": request.prune, "warmup_steps": request.warmup_steps}
    section = {"name": request.name, **{key: value for key, value in rules.items() if value is not None}}
    jobs = []
    for number, one in enumerate(chosen, 1):
        document = document_of(request.spec, {key: values[key][text] for key, text in one.items()})
        labels, own = labels_of(one), document.get("labels") or {}
        named = {"name": f"{_stem(request)}-{number}", "sweep": section}
        if isinstance(own, dict):
            named["labels"] = {**own, **labels}
        jobs.append(Member({**document, **named}, labels))
    return jobs


def specs_of(request: SweepRequest) -> list[JobSpec]:
    """Specs of all jobs of the sweep. Raises InvalidGrid; SpecError, of the first spec that is not valid, with its
    values."""
    specs = []
    for member in members(request):
        try:
            specs.append(parse_spec(member.document))
        except SpecError as error:
            raise _with_values(error, member.labels) from None
    return specs


def submit_sweep(
    store: Store, name: str, jobs: Sequence[tuple[JobSpec, Surroundings]], now: float
) -> tuple[list[str], bool]:
    """The ids of the jobs in their order, and whether one of them is new. All or none are submitted.

    Raises:
        SpecError, CodeUnknown: as `submission.submit`.
        SweepConflict, SweepTooLarge
    """
    packed: dict[str, str] = {}
    checked = []
    for spec, surroundings in jobs:
        directory = spec.code.working_dir
        if directory is not None and directory in packed and spec.code.archive is None:
            spec = spec.model_copy(update={"code": spec.code.model_copy(update={"archive": packed[directory]})})
        spec, note = accepted(store, spec, now, surroundings)
        if directory is not None and spec.code.archive is not None:
            packed[directory] = spec.code.archive
        checked.append((spec, note))
    return store.create_sweep(name, checked, now=now)


def _with_values(error: SpecError, labels: dict[str, str]) -> SpecError:
    return SpecError(
        tuple(SpecProblem(path=one.path, message=f"With {words(labels)}: {one.message}") for one in error.problems)
    )


def _stem(request: SweepRequest) -> str:
    return str(request.spec.get("name", "job"))[:_MAX_STEM]


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value)


def _value(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return decode(value, SpecFormat.YAML)[0]
    except SpecError as error:
        raise InvalidGrid(f"grid.{key}: {value[:80]!r} cannot be used: {error}") from None
