"""The page of `shoal show`. Pure, as `tables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.queue_page import place_text
from shoal_api.cli.render.sparkline import sparkline, worker_bar
from shoal_api.cli.render.tables import STATE_STYLE, clock, number, unit_of
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.quantities import count_text, duration_text
from shoal_service.views import JobView
from shoal_workers.contract.job import UserFailure
from shoal_workers.contract.placing import ANY_CLUSTER
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome

_SPARKLINE_WIDTH = 40


def job_page(job: JobView, series: Sequence[SeriesPoint], now: float, *, several_clusters: bool = False) -> Table:
    """The page of `shoal show`."""
    status = job.status
    unit = unit_of(job)
    state = Text(status.state, style=STATE_STYLE[status.state])
    if status.reason:
        state.append(f" {status.reason}", style="dim")
    rows: list[tuple[str, Any]] = [
        ("id", job.id),
        ("name", job.name),
        ("project", f"{job.spec.project}, user {job.spec.user}, priority {job.spec.priority}"),
        ("labels", ", ".join(f"{name}={value}" for name, value in job.spec.labels.items())),
        ("annotations", "\n".join(f"{name}: {text}" for name, text in job.spec.annotations.items())),
        ("state", state),
        ("message", status.message),
        ("cluster", _cluster(job) if several_clusters else ""),
        ("goes on from", _origin(job)),
        ("queue", place_text(job.queue, now) if job.queue is not None else ""),
        ("finish by", clock(job.spec.finish_by) if job.spec.finish_by is not None else ""),
        ("note", status.note),
        (
            "workers",
            worker_bar(status.workers, status.desired_workers)
            + f"  (min {job.spec.elasticity.min_workers}, max {job.spec.elasticity.max_workers})",
        ),
        ("", held_back_text(job)),
        ("layout", status.layout),
        *(("", _proof(proof)) for proof in status.proofs),
        ("code", _code(job)),
        ("step", f"{status.step}" + (f" of {status.total_steps}" if status.total_steps else "")),
        (
            "loss",
            f"{number(status.loss)}  {sparkline([point.loss for point in series], _SPARKLINE_WIDTH)}".rstrip()
            if status.loss is not None
            else "",
        ),
        ("validation", _validation(job)),
        ("best", _best(job)),
        ("metrics", metrics_text(status.metrics)),
        ("", f"validation: {metrics_text(status.val_metrics)}" if status.val_metrics else ""),
        (f"{unit}/s", number(status.tokens_per_s, 0) if status.tokens_per_s is not None else ""),
        (unit, f"{status.tokens:,}" if status.tokens else ""),
        ("parameters", f"{status.num_parameters:,}" if status.num_parameters else ""),
        ("ETA", duration_text(status.eta_s) if status.eta_s is not None and not status.state.ended else ""),
        ("checkpoint", _checkpoint(job)),
        ("snapshots", _snapshots(job)),
        ("a dead worker", _worker_loss(job)),
        ("a lost node", _node_loss(job)),
        ("incidents", f"{status.incidents}, {count_text(status.steps_lost, 'step')} lost" if status.incidents else ""),
        ("goodput", _goodput(job)),
        ("attempt", f"{status.attempt}, generation {status.generation}" if status.attempt else ""),
        ("created", clock(job.created_at)),
        ("started", clock(job.started_at) if job.started_at else ""),
        ("ended", clock(job.ended_at) if job.ended_at else ""),
    ]
    page = Table.grid(padding=(0, 2))
    page.add_column(style="dim")
    page.add_column(overflow="fold")
    for label, value in rows:
        if str(value):
            page.add_row(label, value if isinstance(value, Text) else Text(str(value)))
    if status.failure is not None:
        page.add_row("failure", Text(status.failure.sentence, style="red"))
        page.add_row("", Text(_where(status.failure), style="dim"))
        page.add_row("", Text(status.failure.traceback.rstrip()))
    return page


def _where(failure: UserFailure) -> str:
    """`in forward, step 4, ranks 0, 2`; a failure before ranks were given names none."""
    ranks = ", ".join(str(rank) for rank in failure.ranks)
    of_ranks = f", {'rank' if len(failure.ranks) == 1 else 'ranks'} {ranks}" if ranks else ""
    return f"in {failure.phase}, step {failure.step}{of_ranks}"


def _proof(proof: LayoutProof) -> str:
    """What one micro-batch, split against whole, has shown."""
    if proof.outcome is not ProofOutcome.PROVEN:
        return f"{proof.outcome}: {proof.words}"
    how = "known from before" if proof.is_cached else f"in {proof.seconds:.1f} s"
    return f"{proof.layout.describe()} is proven, {how}: largest difference {proof.difference:.1g}"


def held_back_text(job: JobView) -> str:
    """Why the job gets no more workers."""
    answer = job.status.held_back
    if answer is None or job.status.state.ended:
        return ""
    return f"stays at {job.status.desired_workers} of {answer.max_workers}: {answer.reason}"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """`accuracy 0.9312, f1 0.8`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _origin(job: JobView) -> str:
    origin = job.spec.continue_from
    return "" if origin is None else f"job {origin.job} after step {origin.step}"


def _cluster(job: JobView) -> str:
    """Where it runs or has run, and where the spec wants it."""
    there, wanted = job.status.cluster, job.spec.worker.cluster
    if wanted == ANY_CLUSTER:
        return there or "any"
    if there in ("", wanted):
        return f"{wanted}, as the spec says"
    return f"{there}; the spec says {wanted}"


def _checkpoint(job: JobView) -> str:
    """The newest one, and up to which step the replicas were found equal."""
    step, verified_step = job.status.checkpoint_step, job.status.verified_step
    if step is None:
        return ""
    return f"step {step}" + (f"; replicas were equal up to step {verified_step}" if verified_step is not None else "")


def _validation(job: JobView) -> str:
    if job.status.val_loss is None:
        return ""
    bits = job.status.val_bits_per_byte
    return f"loss {number(job.status.val_loss)}" + (f", {bits:.3f} bits per byte" if bits is not None else "")


def _best(job: JobView) -> str:
    standing = job.status.best
    if standing is None or not standing.best:
        return ""
    first, patience = standing.best[0], job.spec.validation.patience
    left = f", {standing.num_since} of {patience} validations without an improvement" if patience is not None else ""
    return f"{standing.metric} {first.value:.4g} after step {first.step}{left}"


def _snapshots(job: JobView) -> str:
    every, share = job.status.snapshot_every_steps, job.status.snapshot_share
    if every is None:
        return ""
    pace = "after every step" if every == 1 else f"after every {every:g} steps"
    cost = f", {share:.2%} of the step time" if share is not None else ""
    return f"in memory of each worker, {pace}{cost}"


def _code(job: JobView) -> str:
    code = job.status.code
    if code is None or not code.updating_to:
        return code.version if code is not None else ""
    if code.update == "warming":
        return f"{code.version}; workers with {code.updating_to} start"
    return f"{code.version}, on trial"


def _worker_loss(job: JobView) -> str:
    bound = job.status.worker_loss
    return "" if bound is None or job.status.state.ended else bound.words()


def _node_loss(job: JobView) -> str:
    bound = job.status.node_loss
    return "" if bound is None or job.status.state.ended else bound.words().removeprefix("a lost node ")


def _goodput(job: JobView) -> str:
    goodput = job.status.goodput
    return "" if goodput is None or goodput.ratio is None else f"{goodput.ratio:.1%}"
