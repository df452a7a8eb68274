"""Sweeps: the specs of their jobs and their submission, all or none; and the end of those that are worse (`Pruner`).

The HTTP edge submits; the command line and the client expand a request for a dry run. The rules of a sweep are in the
specs of its jobs: the scheduler keeps to the limit, the control loop prunes, and neither knows the request.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_service.control.spec_io import SpecFormat, decode
from shoal_service.control.submission import Surroundings, accepted
from shoal_service.core.desired import Desired
from shoal_service.core.job_machine import ACTIVE
from shoal_service.core.pruning import Method, Rule, rule_of
from shoal_service.core.sweeps import Interval, InvalidGrid, combinations, document_of, draws, labels_of, words
from shoal_service.store import Store, sweep_jobs
from shoal_service.store.driving import DriveRow
from shoal_service.views import SweepRequest
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, parse_spec
from shoal_workers.contract.spec import JobSpec

MAX_TOTAL_BYTES = 16 << 20
"""Largest size of all specs of a sweep together, in bytes."""
_MAX_STEM = 50
_LOOK_S = 2.0
"""Seconds between two looks, at least."""


@dataclass(frozen=True, slots=True)
class Member:
    """A job of a sweep that is not submitted yet."""

    document: dict[str, Any]
    """Document of the job's spec; not yet validated."""
    labels: dict[str, str]
    """The values of the job, as labels."""


def with_name(request: SweepRequest) -> SweepRequest:
    if request.name is not None:
        return request
    return request.model_copy(update={"name": f"{_stem(request)}-{secrets.token_hex(3)}"})


def members(request: SweepRequest) -> list[Member]:
    """The jobs of a request in the order of the grid, or of the draws; it must have a name. Raises InvalidGrid."""
    texts = {key: tuple(map(_text, values)) for key, values in request.grid.items()}
    for key, text in texts.items():
        if not text or len(set(text)) < len(text):
            raise InvalidGrid(f"grid.{key}: give one value or more, each of them once.")
    chosen = _chosen(request, texts)
    size = len(json.dumps(request.spec))
    if size * len(chosen) > MAX_TOTAL_BYTES:
        raise InvalidGrid(
            f"The spec has {size:,} bytes, and the sweep {len(chosen):,} jobs: together more than "
            f"{MAX_TOTAL_BYTES >> 20} MiB. Leave values out."
        )
    values = {
        key: dict(zip(texts[key], (_value(key, value) for value in given), strict=True))
        for key, given in request.grid.items()
    }
    rules = {name: getattr(request, name) for name in ("limit", "prune", "warmup_steps", "reduction")}
    section = {"name": request.name, **{key: value for key, value in rules.items() if value is not None}}
    jobs = []
    for number, member in enumerate(chosen, 1):
        given = {key: values[key][text] if key in values else json.loads(text) for key, text in member.items()}
        document = document_of(request.spec, given)
        labels, own = labels_of(member), document.get("labels") or {}
        named = {"name": f"{_stem(request)}-{number}", "sweep": section}
        if isinstance(own, dict):
            named["labels"] = {**own, **labels}
        jobs.append(Member({**document, **named}, labels))
    return jobs


def _chosen(request: SweepRequest, texts: dict[str, tuple[str, ...]]) -> list[dict[str, str]]:
    if request.samples is None:
        return combinations(list(texts.items()))
    intervals = {
        key: Interval(interval.low, interval.high, is_log=interval.scale == "log", is_whole=interval.whole)
        for key, interval in request.ranges.items()
    }
    return draws(texts, intervals, samples=request.samples, seed=request.seed)


def specs_of(request: SweepRequest) -> list[JobSpec]:
    """The specs of all jobs of the sweep.

    Raises:
        InvalidGrid
        SpecError: the first spec that is not valid, with its values.
    """
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
    """Submits all jobs of a sweep, or none. Returns the ids of the jobs in their order, and whether one of them is new.

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
    with store.write() as tx:
        return sweep_jobs.create(tx, name, checked, now=now)


def _with_values(error: SpecError, labels: dict[str, str]) -> SpecError:
    return SpecError(
        tuple(
            SpecProblem(path=problem.path, message=f"With {words(labels)}: {problem.message}")
            for problem in error.problems
        )
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


class Pruner:
    """Ends the jobs of sweeps that are worse than the others. Looks again when one of them has trained on.

    Called by the control loop in each pass, on a worker thread. The rule is `core/pruning.py`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, int] = {}
        """Steps of the jobs at the last look."""
        self._looked_mono = float("-inf")
        """Monotonic time of the last look."""

    def look(self, rows: Iterable[DriveRow], mono: float, *, epoch: int, now: float) -> None:
        """Looks at the sweeps whose jobs have trained on. Raises LeaseLost."""
        mine = {row.id: row for row in rows if _may_be_pruned(row)}
        steps = {job_id: row.status.step for job_id, row in mine.items()}
        if not mine or steps == self._seen or mono - self._looked_mono < _LOOK_S:
            return
        self._seen, self._looked_mono = steps, mono
        sweeps: dict[tuple[str, str], dict[str, Rule]] = defaultdict(dict)
        for job_id, row in mine.items():
            sweeps[_sweep_of(row.spec)][job_id] = _rule_of(row.spec)
        for (project, sweep), rules in sweeps.items():
            for job_id, worse in self._store.reading(sweep_jobs.compare)(project, sweep, rules).items():
                with self._store.write(epoch) as tx:
                    sweep_jobs.prune(tx, job_id, sweep, worse, rules[job_id], now=now)


def _may_be_pruned(row: DriveRow) -> bool:
    sweep = row.spec.sweep
    return sweep is not None and sweep.prune is not None and row.state in ACTIVE and row.desired is Desired.RUN


def _sweep_of(spec: JobSpec) -> tuple[str, str]:
    assert spec.sweep is not None
    return spec.project, spec.sweep.name


def _rule_of(spec: JobSpec) -> Rule:
    assert spec.sweep is not None
    validates = spec.validation.samples > 0 and spec.program is None
    return rule_of(
        spec.validation.every_steps if validates else None,
        spec.sweep.warmup_steps,
        Method(spec.sweep.prune or Method.MEDIAN),
        spec.sweep.reduction,
    )
