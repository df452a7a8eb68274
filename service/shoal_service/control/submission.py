"""Submission: checks that the model of a valid spec fits into some layout and that `finish_by` can be met, stores its
code, and creates the job.

The planner predicts how long the job takes with all of its workers, from the measured hardware profile if there is one.
A prediction may be wrong, so it never refuses a job; a `finish_by` that has passed does. Called by the HTTP edge. The
default of `checkpoint.url` is not filled in here, because it contains the job's id, which does not exist yet.

Sweeps: the specs of their jobs and their submission, all or none; and the end of those that are worse (`Pruner`).

The HTTP edge submits; the command line and the client expand a request for a dry run. The rules of a sweep are in the
specs of its jobs: the scheduler keeps to the limit, the control loop prunes, and neither knows the request.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_service.control.code_archive import CodeArchive, CodeArchiveError, pack
from shoal_service.control.market.build import curve_of, sizes_of
from shoal_service.control.planning import measured_profile
from shoal_service.control.spec_io import SpecFormat, decode
from shoal_service.control.webhooks import check_webhooks
from shoal_service.core.alerts import check_alerts
from shoal_service.core.desired import Desired
from shoal_service.core.job_machine import ACTIVE
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.facts import duration, verdict
from shoal_service.core.scheduling.market import MarketJob, WorkerNeed
from shoal_service.core.sweeps import (
    Interval,
    InvalidGrid,
    Method,
    Rule,
    combinations,
    document_of,
    draws,
    labels_of,
    rule_of,
    words,
)
from shoal_service.core.webhooks import UNRESTRICTED, WebhookRules
from shoal_service.fleet_views import DryRun, PlannedSize, StartForecast
from shoal_service.planner import HardwareProfile, memory_note, plan, rank, refusal
from shoal_service.problems import ProblemKind, ServiceError
from shoal_service.store import JobNotFound, Store, access, archives, submissions, sweep_jobs
from shoal_service.store.driving import DriveRow
from shoal_service.views import CodePatch, JobPatch, JobView, SweepRequest
from shoal_workers.contract import JobSpec
from shoal_workers.contract.checks.consistency import capacity_remark, remarks
from shoal_workers.contract.checks.places import EVERYWHERE, AllowedPlaces, check_checkpoint_url, check_places
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, parse_spec


@dataclass(eq=False)
class CodeUnknown(ServiceError):
    """The spec names a code archive that was not uploaded."""

    kind = ProblemKind(
        "code-unknown",
        422,
        "Code archive not uploaded",
        "`code.archive` names an archive that the service does not have. PUT /v1/code/{sha256} first.",
    )
    sha256: str

    def __str__(self) -> str:
        return f"code.archive {self.sha256} is not stored here; PUT /v1/code/{self.sha256} first."


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known at submit about where the job will run."""

    profiles: tuple[HardwareProfile, ...] = ()
    """The hardware profiles. A measured one predicts whether the job can make `finish_by`."""
    nodes: tuple[Node, ...] = ()
    note: str = ""
    """Text with which the note of the job's status begins."""
    places: AllowedPlaces = EVERYWHERE
    webhooks: WebhookRules = UNRESTRICTED


NOTHING_KNOWN = Surroundings()


def patch(
    store: Store,
    job_id: str,
    changes: JobPatch,
    *,
    if_match: str | None,
    now: float,
    places: AllowedPlaces = EVERYWHERE,
) -> JobView:
    """Changes a job's spec. New code is checked and stored as at submit.

    Raises:
        JobNotFound, JobEnded, PreconditionFailed, RequestConflict, SpecError, CodeUnknown
    """
    check_alerts(changes.alerts or ())
    code = changes.code
    if code is not None and code.archive is not None:
        _require_code(store, code.archive)
    elif code is not None:
        spec = store.get_job(job_id).spec
        local = spec.code.model_copy(update={"working_dir": code.working_dir, "archive": None})
        spec = spec.model_copy(update={"code": local})
        check_places(spec, places, os.path.realpath)
        archive = _packed(spec)
        assert archive is not None, "it has a working_dir or an archive"
        _store_code(store, archive, now)
        packed = CodePatch.model_construct(working_dir=code.working_dir, archive=archive.sha256)
        changes = changes.model_copy(update={"code": packed})
    with store.write() as tx:
        return submissions.patch(tx, job_id, changes, if_match=if_match, now=now)


def check_spec(spec: JobSpec, places: AllowedPlaces, webhooks: WebhookRules) -> None:
    """Checks what can be checked without the store and the planner. Raises SpecError."""
    check_checkpoint_url(spec)
    check_places(spec, places, os.path.realpath)
    check_webhooks(spec, webhooks)
    check_alerts(spec.alerts)


def submit(
    store: Store,
    spec: JobSpec,
    idempotency_key: str | None,
    now: float,
    surroundings: Surroundings = NOTHING_KNOWN,
) -> tuple[JobView, bool]:
    """Create a job, or find the one that was created with this key; the second value is False then.

    A `code.working_dir` without an archive is a directory of this machine; it is packed and stored now.

    The note of the job's status says what is probably not meant: a deadline that will be missed, more workers than the
    cluster has room for, and the remarks on the spec.

    Raises:
        SpecError: checkpoint.url is relative, a path or URL is not allowed on this server, a webhook names unknown
            events, or a receiver or secret that is not allowed, the directory cannot be packed, the model fits into no
            layout, or finish_by has passed.
        CodeUnknown, IdempotencyConflict, QueueFull
    """
    spec, note = accepted(store, spec, now, surroundings)
    with store.write() as tx:
        return submissions.create(tx, spec, idempotency_key=idempotency_key, now=now, note=note)


def accepted(store: Store, spec: JobSpec, now: float, surroundings: Surroundings) -> tuple[JobSpec, str]:
    """Stores the code of a spec. Returns the spec as it is submitted, and the note of the job's status. Raises
    SpecError, CodeUnknown."""
    note = _checked(store, spec, now, surroundings)
    if spec.code.archive is not None:
        _require_code(store, spec.code.archive)
    elif (archive := _packed(spec)) is not None:
        with access.preparing():
            _store_code(store, archive, now)
        spec = _with_archive(spec, archive)
    return spec, note


def dry_run(
    store: Store,
    spec: JobSpec,
    now: float,
    surroundings: Surroundings = NOTHING_KNOWN,
    *,
    uploads: bool = False,
    forecast: Callable[[JobSpec], StartForecast | None],
) -> DryRun:
    """Every check of `submit`, the layouts and the start that the job would have. Nothing is stored.

    Args:
        uploads: the client stores the archive before it submits.
        forecast: of the scheduler.

    Raises: as `submit`.
    """
    note = _checked(store, spec, now, surroundings)
    if spec.code.archive is not None and not uploads:
        _require_code(store, spec.code.archive)
    elif spec.code.archive is None and (archive := _packed(spec)) is not None:
        spec = _with_archive(spec, archive)
    job, _ = store.trying(submissions.create)(spec, idempotency_key=None, now=now, note=note)
    profile = measured_profile(surroundings.profiles, has_gpu=spec.worker.gpus > 0)
    # a script or a loop splits its own work, so nothing is planned for it
    sizes = sorted({spec.elasticity.min_workers, spec.elasticity.max_workers}) if spec.program is None else []
    planned = [(size, plan(job.spec, size, profile)) for size in sizes]
    layouts = tuple(
        PlannedSize(
            workers=size,
            layout=size_plan.layout.describe(),
            num_idle=size - size_plan.layout.world_size,
            reason=size_plan.reason,
        )
        for size, size_plan in planned
    )
    return DryRun(spec=job.spec, note=job.status.note, layouts=layouts, start=forecast(job.spec))


def _checked(store: Store, spec: JobSpec, now: float, surroundings: Surroundings) -> str:
    """Checks a spec, and makes the note of the job's status. Raises SpecError."""
    check_spec(spec, surroundings.places, surroundings.webhooks)
    _check_origin(store, spec, surroundings.places)
    too_large = refusal(spec)
    if too_large:
        raise SpecError.at("model", too_large)
    deadline = check_deadline(spec, surroundings.profiles, now)
    room = [(node.cpus, node.gpus) for node in surroundings.nodes if node.alive]
    memory = [(node.cpus, node.gpus, node.memory_gib) for node in surroundings.nodes if node.alive and node.memory_gib]
    profile = measured_profile(surroundings.profiles, has_gpu=spec.worker.gpus > 0)
    capacity = capacity_remark(spec, room) if room else ""
    notes = (surroundings.note, deadline, capacity, memory_note(spec, memory, profile), *remarks(spec))
    return " ".join(filter(None, notes))


def _check_origin(store: Store, spec: JobSpec, places: AllowedPlaces) -> None:
    """Checks that the checkpoints of the job that this one goes on from may be read: the settings may have changed
    since it was submitted."""
    if spec.continue_from is None:
        return
    try:
        url = store.get_job(spec.continue_from.job).spec.checkpoint.url
    except JobNotFound:
        return  # the store says so, with the way out
    if url is not None and (text := places.refusal(url, os.path.realpath)):
        raise SpecError.at(
            "continue_from.job",
            f"continue_from.job {spec.continue_from.job}: its checkpoints are at {url!r}, and {text}.",
        )


def _require_code(store: Store, sha256: str) -> None:
    if not store.reading(archives.exists)(sha256):
        raise CodeUnknown(sha256)


def _store_code(store: Store, packed: CodeArchive, now: float) -> None:
    archive = archives.checked(packed.sha256, packed.data)
    with store.write() as tx:
        archives.put(tx, archive, now=now)


def _packed(spec: JobSpec) -> CodeArchive | None:
    """Packs the directory of this machine that the spec names; None if it names none. Raises SpecError."""
    if spec.code.working_dir is None:
        return None
    try:
        return pack(spec.code.working_dir)
    except CodeArchiveError as error:
        raise SpecError.at("code.working_dir", str(error)) from error


def _with_archive(spec: JobSpec, archive: CodeArchive) -> JobSpec:
    return spec.model_copy(update={"code": spec.code.model_copy(update={"archive": archive.sha256})})


def check_deadline(spec: JobSpec, profiles: Iterable[HardwareProfile], now: float) -> str:
    """Why the deadline will probably be missed, for people; empty: it will not, or that is not known.

    Raises:
        SpecError: finish_by has passed.
    """
    if spec.finish_by is None:
        return ""
    if spec.finish_by <= now:
        raise SpecError.at(
            "finish_by", f"finish_by was {duration(now - spec.finish_by)} ago. Set a later time, or leave it out."
        )
    profile = measured_profile(profiles, has_gpu=spec.worker.gpus > 0)
    if spec.stop is None:
        return ""  # a script: neither its end nor its speed is known
    samples, rates = spec.batch.global_size, {}
    for size in sizes_of(spec.elasticity.max_workers):
        if best := rank(spec, size, profile, 1).predictions:
            rates[size] = samples / best[0].step_s
    if not rates or spec.stop.steps is None:
        return ""  # a task of unknown sizes, or an end that only the data decides
    why = verdict(
        MarketJob(
            job_id="",
            submitted_at=now,
            min_workers=spec.elasticity.min_workers,
            max_workers=spec.elasticity.max_workers,
            need=WorkerNeed(),
            curve=curve_of(rates),
            left=float(spec.stop.steps * samples),
            finish_by=spec.finish_by,
        ),
        now,
    )
    return "" if why is None else f"The deadline will probably be missed: {why}"


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

    Called by the control loop in each pass, on a worker thread. The rule is `core/sweeps.py`.
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
