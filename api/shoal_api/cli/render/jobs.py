"""Renders jobs, their workers and checkpoints as tables and pages, and what a change or a submission would do.

For `shoal jobs`, `show`, `sweep`, `workers`, `checkpoints`, `scale`, `relayout` and `submit --dry-run`. Pure: every
function takes views and returns objects that rich prints.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.terminal import (
    NOT_REPORTED,
    STATE_STYLE,
    command_text,
    draw_sparkline,
    draw_worker_bar,
    format_number,
    format_steps,
    format_time,
    make_facts_grid,
    make_table,
)
from shoal_service.core.alerts import AlertView
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.node_loss import NodeLossBound, WorkerLossBound
from shoal_service.core.quantities import count_text, duration_text, range_text, size_text
from shoal_service.core.where.language import fields_of, parse
from shoal_service.fleet_views import (
    DryRun,
    FleetJob,
    IslandRound,
    JobField,
    StartForecast,
)
from shoal_service.views import (
    CheckpointState,
    CheckpointView,
    JobSummary,
    JobView,
    QueuePlace,
    VerificationState,
    VerificationView,
    WorkerView,
)
from shoal_workers.contract import ANY_CLUSTER, JobState, LayoutProof, Phase, ProofOutcome, UserFailure

_CHECKPOINT_STYLE = {
    CheckpointState.COMMITTED: "green",
    CheckpointState.DAMAGED: "red",
    CheckpointState.DELETED: "dim",
    CheckpointState.FAILED: "red",
}
_REASONS_LIKE_STATES = ("finished", "cancelled", "requested")
"""Reasons that repeat the state of the job."""
_SPARKLINE_WIDTH = 40
_FAMILIES = {"metric": "metrics", "val": "metrics of validation", "label": "labels"}
"""Plurals of the kinds of names such as metric.NAME."""
_MAX_NAMES = 10
_TIMES = frozenset({"created", "updated", "started", "ended", "finish_by"})
"""Columns whose values are seconds since the epoch."""
_NO_JOBS = "no jobs; `shoal submit SPEC` creates one"


def job_line(job: JobView, *facts: str) -> str:
    """Return id, name, state and further facts in one line, which commands print after a change of the job."""
    return "  ".join((job.id, job.name, job.status.state, *facts))


def no_match(num_jobs: int, where: str, fields: Sequence[JobField], now: float) -> Text:
    """Say that no job matches, of how many, and which metrics and labels of the condition no job has."""
    if not num_jobs:
        return Text(_NO_JOBS, style="dim")
    them = "it" if num_jobs == 1 else "them"
    lines = [f"no job matches, of {count_text(num_jobs, 'job')}; `shoal jobs` lists {them}"]
    names = [field.name for field in fields]
    for name in dict.fromkeys(field.name for field in fields_of(parse(where, now))):
        family = name.partition(".")[0]
        existing = [field_name for field_name in names if field_name.startswith(f"{family}.")]
        if family in _FAMILIES and name not in existing:
            lines.append(f"no job has {name}{_suggest(name, family, existing)}")
    return Text("\n".join(lines), style="dim")


def _suggest(name: str, family: str, existing: Sequence[str]) -> str:
    if near := difflib.get_close_matches(name, existing, n=3, cutoff=0.75):
        return f"; near {'it is' if len(near) == 1 else 'it are'} {', '.join(near)}"
    if not existing:
        return f"; no job has {_FAMILIES[family]}"
    return f"; {_FAMILIES[family]} are {', '.join(existing[:_MAX_NAMES])}"


def render_jobs(jobs: Sequence[JobSummary], now: float, columns: Sequence[str] = ()) -> RenderableType:
    """Return the jobs, with id, name, state and `columns`; without `columns` with the usual ones."""
    if not jobs:
        return Text(_NO_JOBS, style="dim")
    if columns:
        return make_table(
            ("id", "name", "state", *columns),
            [(job.id, job.name, state_text(job), *(_value_text(name, job.values) for name in columns)) for job in jobs],
        )
    several_clusters = in_several_clusters(jobs)
    return make_table(
        (
            "id",
            "name",
            *(["cluster"] if several_clusters else []),
            "project",
            "user",
            ">priority",
            "state",
            ">step",
            ">loss",
            ">workers",
            ">age",
        ),
        [
            (
                job.id,
                job.name,
                *([job.cluster or "-"] if several_clusters else []),
                job.project,
                job.user,
                job.priority,
                state_text(job).append(_state_detail(job), style="dim"),
                format_steps(job.step, job.total_steps),
                format_number(job.loss),
                f"{job.workers}/{job.desired_workers}" if job.desired_workers else "-",
                duration_text(now - job.created_at),
            )
            for job in jobs
        ],
    )


def _value_text(column: str, values: Mapping[str, object]) -> str:
    """Return the value of a column as text."""
    value = values.get(column.replace('"', ""))  # a column is written as in a condition, maybe with quotes
    if value is None:
        return "-"
    if column in _TIMES and isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def state_text(job: JobSummary) -> Text:
    return Text(job.state, style=STATE_STYLE[job.state])


def _state_detail(job: JobSummary) -> str:
    if job.queue_position is not None:
        return f" #{job.queue_position}"
    return _reason_text(job.reason)


def _reason_text(reason: str) -> str:
    return f" {reason}" if reason and reason not in _REASONS_LIKE_STATES else ""


def in_several_clusters(jobs: Iterable[JobSummary]) -> bool:
    return len({job.cluster for job in jobs if job.cluster}) > 1


def render_fields(fields: Sequence[JobField]) -> RenderableType:
    return make_table(("name", "kind", "meaning"), [(field.name, field.kind, field.meaning) for field in fields])


def render_workers(workers: Iterable[WorkerView]) -> RenderableType:
    return make_table(
        (">rank", "worker", "state", "phase", ">step", ">generation", ">pid", "node"),
        [
            (
                "-" if worker.rank is None else worker.rank,
                worker.worker_id,
                worker.state,
                worker.phase,
                worker.step,
                worker.generation,
                worker.pid,
                f"{worker.node_ip} {worker.node_id[:8]}",
            )
            for worker in workers
        ],
    )


def render_rounds(rounds: Sequence[IslandRound]) -> RenderableType:
    return make_table(
        (">round", "closed", ">members", ">mean loss", ">island", ">step", ">tokens", ">loss", ">size", ">waited"),
        [row for island_round in rounds for row in _rows_of_round(island_round)],
        empty="no rounds yet",
    )


def _rows_of_round(island_round: IslandRound) -> Iterator[tuple[object, ...]]:
    decision = island_round.decision
    closed = format_time(island_round.closed_at) if island_round.closed_at else "open"
    num_members = "-" if decision is None else len(decision.members)
    head: tuple[object, ...] = (island_round.round, closed, num_members, format_number(island_round.loss))
    for arrival in sorted(island_round.arrived, key=lambda arrival: arrival.island):
        waited = duration_text(arrival.waited_s)
        size, loss = size_text(arrival.num_bytes), format_number(arrival.loss)
        yield (*head, arrival.island, arrival.step, arrival.tokens, loss, size, waited)
        head = ("", "", "", "")


def render_checkpoints(checkpoints: Sequence[CheckpointView]) -> RenderableType:
    return make_table(
        (">step", "state", ">size", ">took", ">stall", ">workers", "committed", "url"),
        [
            (
                checkpoint.step,
                Text(
                    f"{checkpoint.state}{', pinned' if checkpoint.pinned else ''}{_validation_rank_text(checkpoint)}",
                    style=_CHECKPOINT_STYLE[checkpoint.state],
                ),
                *_measures(checkpoint),
                format_time(checkpoint.committed_at) if checkpoint.committed_at else "-",
                f"{checkpoint.url}\n{checkpoint.message}" if checkpoint.message else checkpoint.url,
            )
            for checkpoint in checkpoints
        ],
        empty="no checkpoints yet",
    )


def _measures(checkpoint: CheckpointView) -> tuple[object, ...]:
    if not checkpoint.world_size:
        return ("-",) * 4  # only its deletion or damage is recorded
    took, stall = duration_text(checkpoint.seconds), duration_text(checkpoint.stall_s)
    return size_text(checkpoint.bytes), took, stall, checkpoint.world_size


def _validation_rank_text(checkpoint: CheckpointView) -> str:
    """Return the rank of a checkpoint by validation."""
    if checkpoint.best is None:
        return ""
    return f", best ({checkpoint.score:.4g})" if checkpoint.best == 1 else f", {checkpoint.best}. best"


def verification_line(view: VerificationView) -> str:
    """Return `step-...: 1.5 GiB of 3.0 GiB read`, or the result."""
    if view.state is VerificationState.RUNNING:
        return f"{view.name}: {size_text(view.bytes_read)} of {size_text(view.bytes)} read"
    if view.state is VerificationState.WHOLE:
        return f"{view.name}: whole, {size_text(view.bytes_read)} read in {duration_text(view.seconds)}"
    return f"{view.name} is {view.state}: {view.message}"


def token_unit(job: JobView) -> str:
    """Return `tokens` or `samples`: a task without tokens counts one for each sample."""
    status = job.status
    if job.spec.program is not None:
        return "tokens" if job.spec.script is not None else "samples"
    is_plain = status.step and status.tokens == status.step * job.spec.batch.global_size
    return "samples" if is_plain else "tokens"


def describe_alert(alert: AlertView) -> str:
    """Return an alert, and whether it holds, in one line."""
    if alert.step is None:
        return f"{alert.condition}: not yet"
    return f"{alert.condition}: {'since' if alert.holds else 'not now, last at'} step {alert.step}"


def render_sweep(jobs: Sequence[FleetJob]) -> RenderableType:
    """Return the jobs of a sweep with the values that differ between them."""
    names = sorted({name for job in jobs for name in job.labels if name != "sweep"})
    differ = [name for name in names if len({job.labels.get(name) for job in jobs}) > 1] or names
    return make_table(
        ("id", *differ, "state", ">step", ">loss", ">validation", ">workers", "why"),
        [
            (
                job.id,
                *(job.labels.get(name, "-") for name in differ),
                Text(job.state, style=STATE_STYLE[job.state]),
                format_steps(job.step, job.total_steps),
                format_number(job.loss),
                format_number(job.val_loss),
                job.workers,
                "" if job.state is JobState.RUNNING else job.message,
            )
            for job in jobs
        ],
    )


def render_job(
    job: JobView,
    series: Sequence[SeriesPoint],
    now: float,
    *,
    several_clusters: bool = False,
    names: Mapping[str, str] | None = None,
) -> Table:
    """Return the page of `shoal show`. `names`: names of the jobs for which the job waits, by id."""
    status = job.status
    unit = token_unit(job)
    unknown = NOT_REPORTED if is_silent(job) and not status.state.ended else ""
    state = Text(status.state, style=STATE_STYLE[status.state]).append(_reason_text(status.reason), style="dim")
    limits = f"min {job.spec.elasticity.min_workers}, max {job.spec.elasticity.max_workers}"
    identity: list[tuple[str, str | Text]] = [
        ("id", job.id),
        ("name", job.name),
        ("project", f"{job.spec.project}, user {job.spec.user}, priority {job.spec.priority}"),
        ("labels", ", ".join(f"{name}={value}" for name, value in job.spec.labels.items())),
        ("annotations", "\n".join(f"{name}: {text}" for name, text in job.spec.annotations.items())),
        ("command", command_text(job.spec.program) if job.spec.program is not None else ""),
        ("goes on from", _origin_text(job)),
        ("code", _code_text(job)),
    ]
    progress: list[tuple[str, str | Text]] = [
        ("state", state),
        ("message", status.message),
        ("cluster", _cluster(job) if several_clusters else ""),
        ("waiting", _waiting(job, now)),
        ("queue", describe_place(job.queue, now, names or {}) if job.queue is not None else ""),
        ("finish by", format_time(job.spec.finish_by) if job.spec.finish_by is not None else ""),
        ("note", status.note),
        ("created", format_time(job.created_at)),
        ("started", format_time(job.started_at) if job.started_at else ""),
        ("ended", format_time(job.ended_at) if job.ended_at else ""),
    ]
    training: list[tuple[str, str | Text]] = [
        ("step", step_text(job)),
        ("loss", _loss(job, series)),
        ("validation", _validation(job)),
        ("best", _best(job)),
        ("alerts", "\n".join(describe_alert(alert) for alert in status.alerts)),
        ("metrics", metrics_text(status.metrics)),
        ("", f"validation: {metrics_text(status.val_metrics)}" if status.val_metrics else ""),
        (f"{unit}/s", format_number(status.tokens_per_s, 0) if status.tokens_per_s is not None else unknown),
        (unit, f"{status.tokens:,}" if status.tokens else ""),
        ("parameters", f"{status.num_parameters:,}" if status.num_parameters else ""),
        ("ETA", duration_text(status.eta_s) if status.eta_s is not None and not status.state.ended else unknown),
    ]
    workers: list[tuple[str, str | Text]] = [
        (
            "workers",
            f"{draw_worker_bar(status.workers, status.desired_workers)}  ({limits})"
            if status.desired_workers
            else limits,
        ),
        ("", held_back_text(job)),
        ("layout", status.layout),
        ("", status.layout_reason),
        *(("", _proof_text(proof)) for proof in status.proofs),
        ("checkpoint", _checkpoint(job)),
        ("snapshots", _snapshots(job)),
        ("if a worker dies", _cost_text(job, status.worker_loss)),
        ("if a node is lost", _cost_text(job, status.node_loss).removeprefix("losing a node ")),
        ("incidents", f"{status.incidents}, {steps_lost_text(job)}" if status.incidents else ""),
        ("goodput", goodput_text(job)),
        ("attempt", f"{status.attempt}, generation {status.generation}" if status.attempt else ""),
    ]
    if status.failure is not None:
        failure = Text(_failure_text(status.failure), style="red")
        workers += [("failure", failure), ("", status.failure.traceback.rstrip())]
    return make_facts_grid(identity, progress, training, workers)


def _waiting(job: JobView, now: float) -> str:
    since = None if job.queue is None else job.queue.waiting_since
    return "" if since is None else f"since {format_time(since)} ({duration_text(max(0.0, now - since))})"


def is_silent(job: JobView) -> bool:
    """Return True if the job is a script with a group, so that it could have reported what is unknown."""
    return job.spec.script is not None and job.status.generation > 0


def step_text(job: JobView, of: str = " of ") -> str:
    """Return `120 of 400`; empty for a script that has not begun."""
    status = job.status
    if job.spec.script is not None and not status.step and status.step_at is None:
        return NOT_REPORTED if is_silent(job) else ""
    return f"{status.step}{of}{status.total_steps}" if status.total_steps else str(status.step)


def steps_lost_text(job: JobView) -> str:
    """Return `3 steps lost`."""
    if step_text(job) == NOT_REPORTED:
        return f"lost steps {NOT_REPORTED}"
    return f"{count_text(job.status.steps_lost, 'step')} lost"


def _loss(job: JobView, series: Sequence[SeriesPoint]) -> str:
    if job.status.loss is None:
        return NOT_REPORTED if is_silent(job) else ""
    curve = draw_sparkline([point.loss for point in series], _SPARKLINE_WIDTH)
    return f"{format_number(job.status.loss)}  {curve}".rstrip()


def _failure_text(failure: UserFailure) -> str:
    """Return `in forward, step 4, ranks 0, 2`, without what is unknown."""
    # ranks are unknown before a group forms, and so is the step of a script that has reported none
    ranks = ", ".join(str(rank) for rank in failure.ranks)
    rank_text = f", {'rank' if len(failure.ranks) == 1 else 'ranks'} {ranks}" if ranks else ""
    step = f", step {failure.step}" if failure.step or failure.phase != Phase.SCRIPT else ""
    return f"in {failure.phase}{step}{rank_text}"


def _proof_text(proof: LayoutProof) -> str:
    """Describe the proof of a layout, in which one micro-batch is computed split and whole."""
    if proof.outcome is not ProofOutcome.PROVEN:
        return f"{proof.outcome}: {proof.words}"
    how = "known from before" if proof.is_cached else f"in {proof.seconds:.1f} s"
    return f"{proof.layout.describe()} is proven, {how}: largest difference {proof.difference:.1g}"


def held_back_text(job: JobView) -> str:
    """Say why the job gets no more workers."""
    answer = job.status.held_back
    if answer is None or job.status.state.ended:
        return ""
    return f"stays at {job.status.desired_workers} of {answer.max_workers}: {answer.reason}"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return `accuracy 0.9312, f1 0.8`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _origin_text(job: JobView) -> str:
    origin = job.spec.continue_from
    if origin is None:
        return ""
    return f"the files of job {origin.job}" if origin.step is None else f"job {origin.job} after step {origin.step}"


def _cluster(job: JobView) -> str:
    """Say where the job runs or has run, and where the spec puts it."""
    current, requested = job.status.cluster, job.spec.worker.cluster
    if requested == ANY_CLUSTER:
        return current or "any"
    if current in ("", requested):
        return f"{requested} (from the spec)"
    return f"{current}; the spec says {requested}"


def _checkpoint(job: JobView) -> str:
    """Return the newest checkpoint, and the step up to which the replicas were found equal."""
    step, verified_step = job.status.checkpoint_step, job.status.verified_step
    if step is None:
        return ""
    return f"step {step}" + (f"; replicas were equal up to step {verified_step}" if verified_step is not None else "")


def _validation(job: JobView) -> str:
    if job.status.val_loss is None:
        return ""
    bits = job.status.val_bits_per_byte
    return f"loss {format_number(job.status.val_loss)}" + (f", {bits:.3f} bits per byte" if bits is not None else "")


def _best(job: JobView) -> str:
    ranking = job.status.best
    if ranking is None or not ranking.best:
        return ""
    first, patience = ranking.best[0], job.spec.validation.patience
    left = f", {ranking.num_since} of {patience} validations without an improvement" if patience is not None else ""
    return f"{ranking.metric} {first.value:.4g} after step {first.step}{left}"


def _snapshots(job: JobView) -> str:
    every, share = job.status.snapshot_every_steps, job.status.snapshot_share
    if every is None:
        return ""
    pace = "after every step" if every == 1 else f"after every {every:g} steps"
    cost = f", {share:.2%} of the step time" if share is not None else ""
    return f"in memory of each worker, {pace}{cost}"


def _code_text(job: JobView) -> str:
    code = job.status.code
    if code is None or not code.updating_to:
        return code.version if code is not None else ""
    if code.update == "warming":
        return f"{code.version}; workers with {code.updating_to} start"
    return f"{code.version}, on trial"


def _cost_text(job: JobView, bound: WorkerLossBound | NodeLossBound | None) -> str:
    return "" if bound is None or job.status.state.ended else bound.describe()


def goodput_text(job: JobView) -> str:
    goodput = job.status.goodput
    return "" if goodput is None or goodput.ratio is None else f"{goodput.ratio:.1%}"


def next_workers(job: JobView) -> int:
    """Return the number of workers of the next group; for a job that does not train, its maximum."""
    elastic, granted = job.spec.elasticity, job.status.desired_workers
    if not job.status.workers:
        return elastic.max_workers
    return max(elastic.min_workers, min(granted or job.status.workers, elastic.max_workers))


def render_change(job: JobView, layout: str, reason: str) -> str:
    """Say what the changed spec will do to its job: workers and layout before and after.

    Args:
        layout: the planner's layout for `next_workers(job)`; empty if it has none.
        reason: why that layout, or why none.
    """
    lines = [
        f"{job.id}  {job.name}  {job.status.state}",
        f"workers  {_workers_after(job)}",
        f"layout   {_layout_after(job, layout)}",
    ]
    return "\n".join([*lines, f"         {reason}"] if reason else lines)


def _workers_after(job: JobView) -> str:
    elastic, now, following = job.spec.elasticity, job.status.workers, next_workers(job)
    limits = f"(min {elastic.min_workers}, max {elastic.max_workers}, standby {elastic.standby})"
    if not now:
        most = count_text(elastic.max_workers, "worker")
        amount = most if elastic.min_workers == elastic.max_workers else f"{elastic.min_workers} to {most}"
        return f"{amount} when it starts {limits}"
    if following < now:
        change = f"{now} -> {following} at the next step boundary; no step is lost"
    elif following > now:
        change = f"{now} -> {following} as soon as the other workers are ready; no step is lost"
    elif following < elastic.max_workers:
        change = (
            f"{now}, and up to {elastic.max_workers} if more workers pay off; `shoal show {job.id}` says "
            "why it has no more"
        )
    else:
        change = f"{now}, as before"
    return f"{change} {limits}"


def _layout_after(job: JobView, layout: str) -> str:
    before = job.status.layout if job.status.workers else ""
    if not layout:
        return f"{before or 'none'}; the planner has no other layout"
    if not before:
        return f"{layout} for {count_text(next_workers(job), 'worker')}"
    return f"{before}, as before" if before == layout else f"{before} -> {layout} at the next step boundary"


def describe_start_time(expected_at: float | None, now: float) -> str:
    """Describe when a queued job is expected to start, rounded to the precision of the forecast."""
    if expected_at is None:
        return "not known"
    left_s = expected_at - now
    if left_s < 1:
        return "now"
    unit = next(unit for unit in (10, 60, 300, 600) if left_s < 15 * unit or unit == 600)
    return f"in about {duration_text(max(1, round(left_s / unit)) * unit).removesuffix(' 00 s')}"


def describe_place(place: QueuePlace, now: float, names: Mapping[str, str]) -> str:
    """Describe the place of one job, for `shoal show`. The job's message has the reason."""
    blockers = f", waiting for {join_holders(place, names)}" if place.holders else ""
    return f"position {place.position}{blockers}; expected start: {describe_start_time(place.expected_at, now)}"


def join_holders(place: QueuePlace, names: Mapping[str, str]) -> str:
    return ", ".join(names.get(holder, holder) for holder in place.holders)


def render_dry_run(result: DryRun, now: float) -> Table:
    spec = result.spec
    layouts = [
        (count_text(layout.workers, "worker"), _format_layout(layout.layout, layout.num_idle))
        for layout in result.layouts
    ]
    if spec.program is not None:  # it splits its own work
        layouts = [
            ("command", command_text(spec.program)),
            ("workers", range_text(spec.elasticity.min_workers, spec.elasticity.max_workers)),
        ]
    return make_facts_grid(
        [
            ("name", spec.name),
            ("project", f"{spec.project}, user {spec.user}, priority {spec.priority}"),
            ("start", _describe_start(result.start, now)),
            *layouts,
            ("note", result.note),
            ("", "The spec is accepted. Nothing was submitted."),
        ]
    )


def _describe_start(start: StartForecast | None, now: float) -> str:
    if start is None:
        return "unknown: this server does not schedule at the moment"
    if start.workers is not None:
        return f"at once. {start.reason}"
    when = (
        "start time unknown"
        if start.expected_at is None
        else f"expected start: {describe_start_time(start.expected_at, now)}"
    )
    return f"it would be number {start.position} in the queue; {when}. {start.reason}"


def _format_layout(layout: str, num_idle: int) -> str:
    return layout + (f", {count_text(num_idle, 'worker')} idle" if num_idle else "")
