"""Submits jobs and sweeps: checks specs, stores their code, creates the jobs; and prunes sweeps.

A valid spec is refused if its model fits into no layout, or if `finish_by` has passed. The planner predicts how long
the job takes with all of its workers, from the measured hardware profile if there is one; a prediction may be wrong, so
it only makes a note. The default of `checkpoint.url` is not filled in here, because it contains the job's id, which
does not exist yet.

The jobs of a sweep are submitted all or none. The HTTP edge submits; the command line and the client expand a request
for a dry run. The rules of a sweep are in the specs of its jobs: the scheduler enforces the limit, the control loop
ends jobs that are worse than others (`Pruner`), and neither knows the request.
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
from shoal_service.control.market.build import choose_sizes, make_curve
from shoal_service.control.planning import measured_profile
from shoal_service.control.spec_io import SpecFormat, decode
from shoal_service.control.webhooks import check_webhooks
from shoal_service.core.alerts import check_alerts
from shoal_service.core.desired import Desired
from shoal_service.core.job_machine import ACTIVE
from shoal_service.core.nodes import Node
from shoal_service.core.quantities import duration_text
from shoal_service.core.scheduling.market import MarketJob, WorkerNeed, describe_missed
from shoal_service.core.sweeps import (
    Interval,
    InvalidGrid,
    Method,
    Rule,
    combine,
    describe_labels,
    draw,
    make_document,
    make_labels,
    make_rule,
)
from shoal_service.core.webhooks import UNRESTRICTED, WebhookRules
from shoal_service.fleet_views import DryRun, PlannedSize, StartForecast
from shoal_service.planner import HardwareProfile, memory_note, plan, rank, refusal
from shoal_service.problems import ServiceError
from shoal_service.store import DriveRow, JobNotFound, Store, access, archives, submissions, sweep_jobs
from shoal_service.views import CodePatch, JobPatch, JobView, SweepRequest
from shoal_workers.contract import JobSpec
from shoal_workers.contract.checks.consistency import capacity_remark, remarks
from shoal_workers.contract.checks.places import EVERYWHERE, AllowedPlaces, check_checkpoint_url, check_places
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, parse_spec
from shoal_workers.contract.spec import SweepSpec


@dataclass(eq=False)
class CodeUnknown(
    ServiceError,
    code="code-unknown",
    status=422,
    title="Code archive not uploaded",
    text="code.archive {sha256} is not stored here; PUT /v1/code/{sha256} first.",
):
    """`code.archive` names an archive that the service does not have. PUT /v1/code/{sha256} first."""

    sha256: str


@dataclass(frozen=True, slots=True)
class SubmitContext:
    """What is known at submit about where the job will run."""

    profiles: tuple[HardwareProfile, ...] = ()
    """A measured one predicts if the job can meet `finish_by`."""
    nodes: tuple[Node, ...] = ()
    note: str = ""
    """Begin of the note of the job's status."""
    places: AllowedPlaces = EVERYWHERE
    webhooks: WebhookRules = UNRESTRICTED


def patch(
    store: Store,
    job_id: str,
    changes: JobPatch,
    *,
    if_match: str | None,
    now: float,
    places: AllowedPlaces = EVERYWHERE,
) -> JobView:
    """Change a job's spec. New code is checked and stored as at submit.

    Raises:
        JobNotFound, JobEnded, PreconditionFailed, RequestConflict, SpecError, CodeUnknown
    """
    check_alerts(changes.alerts or ())
    code = changes.code
    if code is not None and code.archive is not None:
        _require_code(store, code.archive)
    elif code is not None:
        spec = _change_code(store.get_job(job_id).spec, working_dir=code.working_dir, archive=None)
        check_places(spec, places, os.path.realpath)
        archive = _pack_code(spec)
        assert archive is not None, "it has a working_dir or an archive"
        _store_code(store, archive, now)
        packed = CodePatch.model_construct(working_dir=code.working_dir, archive=archive.sha256)
        changes = changes.model_copy(update={"code": packed})
    return store.writing(submissions.patch)(job_id, changes, if_match=if_match, now=now)


def check_spec(spec: JobSpec, places: AllowedPlaces, webhooks: WebhookRules) -> None:
    """Check what needs neither the store nor the planner. Raises SpecError."""
    check_checkpoint_url(spec)
    if spec.islands is not None and spec.islands.index is None:
        raise SpecError.at(
            "islands.index",
            "islands.index is not set. `shoal submit` makes one job for each island; with the REST API, POST "
            f'/v1/sweeps with "grid": {{"islands.index": {[*range(spec.islands.num)]}}}.',
        )
    check_places(spec, places, os.path.realpath)
    check_webhooks(spec, webhooks)
    check_alerts(spec.alerts)


def submit(
    store: Store,
    spec: JobSpec,
    idempotency_key: str | None,
    now: float,
    context: SubmitContext,
) -> tuple[JobView, bool]:
    """Create a job, or find that which was created with this key.

    The second value is True if the job is new.

    A `code.working_dir` without an archive is a directory of this machine; it is packed and stored now.

    The note of the job's status lists warnings: a deadline that will be missed, more workers than the cluster has room
    for, and the remarks on the spec.

    Raises:
        SpecError: checkpoint.url is relative; this server does not allow a path, a URL, or the receiver or secret of a
            webhook; a webhook names unknown events; the directory cannot be packed; the model fits into no layout; or
            finish_by has passed.
        CodeUnknown, IdempotencyConflict, QueueFull
    """
    spec, note = _accept(store, spec, now, context)
    return store.writing(submissions.create)(spec, idempotency_key=idempotency_key, now=now, note=note)


def _accept(store: Store, spec: JobSpec, now: float, context: SubmitContext) -> tuple[JobSpec, str]:
    """Check a spec, and store its code. Raises SpecError, CodeUnknown.

    Return the spec with the archive of its code, and the note of the job's status.
    """
    if spec.islands is not None and spec.islands.clusters and spec.islands.index is not None:
        cluster = spec.islands.clusters[spec.islands.index]
        spec = spec.model_copy(update={"worker": spec.worker.model_copy(update={"cluster": cluster})})
    note = _check(store, spec, now, context)
    if spec.code.archive is not None:
        _require_code(store, spec.code.archive)
    elif (archive := _pack_code(spec)) is not None:
        with access.preparing():
            _store_code(store, archive, now)
        spec = _change_code(spec, archive=archive.sha256)
    return spec, note


def dry_run(
    store: Store,
    spec: JobSpec,
    now: float,
    context: SubmitContext,
    *,
    uploads: bool = False,
    forecast: Callable[[JobSpec], StartForecast | None],
) -> DryRun:
    """Make every check of `submit`, and predict layouts and start. Stores nothing.

    Args:
        uploads: the client stores the archive before it submits.
        forecast: asks the scheduler when the job would start.

    Raises: as `submit`.
    """
    note = _check(store, spec, now, context)
    if spec.code.archive is None:
        if (archive := _pack_code(spec)) is not None:
            spec = _change_code(spec, archive=archive.sha256)
    elif not uploads:
        _require_code(store, spec.code.archive)
    job, _ = store.trying(submissions.create)(spec, idempotency_key=None, now=now, note=note)
    profile = measured_profile(context.profiles, has_gpu=spec.worker.gpus > 0)
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


def _check(store: Store, spec: JobSpec, now: float, context: SubmitContext) -> str:
    """Check a spec, and return the note of the job's status. Raises SpecError."""
    check_spec(spec, context.places, context.webhooks)
    _check_origin(store, spec, context.places)
    too_large = refusal(spec)
    if too_large:
        raise SpecError.at("model", too_large)
    deadline = check_deadline(spec, context.profiles, now)
    room = [(node.cpus, node.gpus) for node in context.nodes if node.alive]
    memory = [(node.cpus, node.gpus, node.memory_gib) for node in context.nodes if node.alive and node.memory_gib]
    profile = measured_profile(context.profiles, has_gpu=spec.worker.gpus > 0)
    capacity = capacity_remark(spec, room) if room else ""
    notes = (context.note, deadline, capacity, memory_note(spec, memory, profile), *remarks(spec))
    return " ".join(filter(None, notes))


def _check_origin(store: Store, spec: JobSpec, places: AllowedPlaces) -> None:
    """Check that the checkpoints of the job in `continue_from` may be read.

    The settings may have changed since that job was submitted.
    """
    if spec.continue_from is None:
        return
    try:
        url = store.get_job(spec.continue_from.job).spec.checkpoint.url
    except JobNotFound:
        return  # creating the job raises this, with the way out
    if url is not None and (text := places.refusal(url, os.path.realpath)):
        raise SpecError.at(
            "continue_from.job",
            f"continue_from.job {spec.continue_from.job}: its checkpoints are at {url!r}, and {text}.",
        )


def _require_code(store: Store, sha256: str) -> None:
    if not store.reading(archives.exists)(sha256):
        raise CodeUnknown(sha256)


def _store_code(store: Store, packed: CodeArchive, now: float) -> None:
    archive = archives.check(packed.sha256, packed.data)
    store.writing(archives.put)(archive, now=now)


def _pack_code(spec: JobSpec) -> CodeArchive | None:
    """Pack the directory of this machine that the spec names; None if it names none. Raises SpecError."""
    if spec.code.working_dir is None:
        return None
    try:
        return pack(spec.code.working_dir)
    except CodeArchiveError as error:
        raise SpecError.at("code.working_dir", str(error)) from error


def _change_code(spec: JobSpec, **changes: str | None) -> JobSpec:
    return spec.model_copy(update={"code": spec.code.model_copy(update=changes)})


def check_deadline(spec: JobSpec, profiles: Iterable[HardwareProfile], now: float) -> str:
    """Return why the deadline will probably be missed; empty if it will be met, or that is not known.

    Raises:
        SpecError: finish_by has passed.
    """
    if spec.finish_by is None:
        return ""
    if spec.finish_by <= now:
        raise SpecError.at(
            "finish_by", f"finish_by was {duration_text(now - spec.finish_by)} ago. Set a later time, or leave it out."
        )
    profile = measured_profile(profiles, has_gpu=spec.worker.gpus > 0)
    if spec.stop is None:
        return ""  # a script: neither its end nor its speed is known
    samples, rates = spec.batch.global_size, {}
    for size in choose_sizes(spec.elasticity.max_workers):
        if best := rank(spec, size, profile, 1).predictions:
            rates[size] = samples / best[0].step_s
    if not rates or spec.stop.steps is None:
        return ""  # a task of unknown sizes, or an end that only the data decides
    miss = describe_missed(
        MarketJob(
            job_id="",
            submitted_at=now,
            min_workers=spec.elasticity.min_workers,
            max_workers=spec.elasticity.max_workers,
            need=WorkerNeed(),
            curve=make_curve(rates),
            left=float(spec.stop.steps * samples),
            finish_by=spec.finish_by,
        ),
        now,
    )
    return "" if miss is None else f"The deadline will probably be missed: {miss}"


MAX_TOTAL_BYTES = 16 << 20
"""Largest size of all specs of a sweep together, in bytes."""
_MAX_STEM = 50
_PRUNE_S = 2.0
"""Shortest time between two comparisons of the jobs of sweeps, in seconds."""


@dataclass(frozen=True, slots=True)
class SweepJob:
    """A job of a sweep that is not submitted yet."""

    document: dict[str, Any]
    """Document of the job's spec; not yet validated."""
    labels: dict[str, str]
    """The values of the job, as labels."""


def fill_name(request: SweepRequest) -> SweepRequest:
    """Return the request with a name; one without gets the name of its spec and a random number."""
    if request.name is not None:
        return request
    return request.model_copy(update={"name": f"{_shorten_name(request)}-{secrets.token_hex(3)}"})


def expand_jobs(request: SweepRequest) -> list[SweepJob]:
    """Return the jobs of a request that has a name. Raises InvalidGrid.

    In the order of the grid, or of the draws.
    """
    texts = {key: tuple(map(_format_value, values)) for key, values in request.grid.items()}
    for key, text in texts.items():
        if not text or len(set(text)) < len(text):
            raise InvalidGrid(f"grid.{key}: give one value or more, each of them once.")
    choices = _choose_values(request, texts)
    size = len(json.dumps(request.spec))
    if size * len(choices) > MAX_TOTAL_BYTES:
        raise InvalidGrid(
            f"The spec has {size:,} bytes, and the sweep {len(choices):,} jobs: together more than "
            f"{MAX_TOTAL_BYTES >> 20} MiB. Leave values out."
        )
    values = {
        key: dict(zip(texts[key], (_parse_value(key, value) for value in listed), strict=True))
        for key, listed in request.grid.items()
    }
    rules = {name: getattr(request, name) for name in ("limit", "prune", "warmup_steps", "reduction")}
    section = {"name": request.name, **{key: value for key, value in rules.items() if value is not None}}
    jobs = []
    for number, choice in enumerate(choices, 1):
        parsed = {key: values[key][text] if key in values else json.loads(text) for key, text in choice.items()}
        document = make_document(request.spec, parsed)
        labels, spec_labels = make_labels(choice), document.get("labels") or {}
        document |= {"name": f"{_shorten_name(request)}-{number}", "sweep": section}
        if isinstance(spec_labels, dict):
            document["labels"] = {**spec_labels, **labels}
        jobs.append(SweepJob(document, labels))
    return jobs


def _choose_values(request: SweepRequest, texts: dict[str, tuple[str, ...]]) -> list[dict[str, str]]:
    if request.samples is None:
        return combine(list(texts.items()))
    intervals = {
        key: Interval(interval.low, interval.high, is_log=interval.scale == "log", is_whole=interval.whole)
        for key, interval in request.ranges.items()
    }
    return draw(texts, intervals, samples=request.samples, seed=request.seed)


def expand_specs(request: SweepRequest) -> list[JobSpec]:
    """Return the specs of all jobs of the sweep.

    Raises:
        InvalidGrid
        SpecError: the first spec that is not valid, with its values.
    """
    specs = []
    for job in expand_jobs(request):
        try:
            specs.append(parse_spec(job.document))
        except SpecError as error:
            values = describe_labels(job.labels)
            raise SpecError(
                tuple(
                    SpecProblem(path=problem.path, message=f"With {values}: {problem.message}")
                    for problem in error.problems
                )
            ) from None
    return specs


def submit_sweep(
    store: Store, name: str, jobs: Sequence[tuple[JobSpec, SubmitContext]], now: float
) -> tuple[list[str], bool]:
    """Submit all jobs of a sweep, or none. Return their ids in order, and True if one of them is new.

    Raises:
        SpecError, CodeUnknown: as `submit`.
        SweepConflict, SweepTooLarge
    """
    archives_by_directory: dict[str, str] = {}
    accepted = []
    for spec, context in jobs:
        directory = spec.code.working_dir
        if directory is not None and directory in archives_by_directory and spec.code.archive is None:
            spec = _change_code(spec, archive=archives_by_directory[directory])
        spec, note = _accept(store, spec, now, context)
        if directory is not None and spec.code.archive is not None:
            archives_by_directory[directory] = spec.code.archive
        accepted.append((spec, note))
    return store.writing(sweep_jobs.create)(name, accepted, now=now)


def _shorten_name(request: SweepRequest) -> str:
    return str(request.spec.get("name", "job"))[:_MAX_STEM]


def _format_value(value: Any) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value)


def _parse_value(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return decode(value, SpecFormat.YAML)[0]
    except SpecError as error:
        raise InvalidGrid(f"grid.{key}: {value[:80]!r} cannot be used: {error}") from None


class Pruner:
    """Ends jobs of sweeps that are worse than the others. Compares them again after one of them has trained on.

    The control loop calls it in each pass, on a worker thread. The rule is in `core/sweeps.py`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._steps: dict[str, int] = {}
        """Steps of the jobs at the last comparison."""
        self._compared_mono = float("-inf")

    def prune(self, rows: Iterable[DriveRow], mono: float, *, epoch: int, now: float) -> None:
        """Compare jobs that have trained on, and end the worse ones. Raises LeaseLost."""
        prunable = {row.id: row for row in rows if _may_be_pruned(row)}
        steps = {job_id: row.status.step for job_id, row in prunable.items()}
        if not prunable or steps == self._steps or mono - self._compared_mono < _PRUNE_S:
            return
        self._steps, self._compared_mono = steps, mono
        sweeps: dict[tuple[str, str], dict[str, Rule]] = defaultdict(dict)
        for job_id, row in prunable.items():
            assert row.spec.sweep is not None
            sweeps[row.spec.project, row.spec.sweep.name][job_id] = _make_rule(row.spec, row.spec.sweep)
        for (project, sweep), rules in sweeps.items():
            for job_id, worse in self._store.reading(sweep_jobs.find_worse)(project, sweep, rules).items():
                self._store.writing(sweep_jobs.prune, epoch)(job_id, sweep, worse, rules[job_id], now=now)


def _may_be_pruned(row: DriveRow) -> bool:
    sweep = row.spec.sweep
    return sweep is not None and sweep.prune is not None and row.state in ACTIVE and row.desired is Desired.RUN


def _make_rule(spec: JobSpec, sweep: SweepSpec) -> Rule:
    validates = spec.validation.samples > 0 and spec.program is None
    return make_rule(
        spec.validation.every_steps if validates else None,
        sweep.warmup_steps,
        Method(sweep.prune or Method.MEDIAN),
        sweep.reduction,
    )
