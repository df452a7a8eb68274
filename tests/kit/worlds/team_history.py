"""A month of a team's jobs in the store of a written service: a base model and those that went on from it, a study in
two arms, a sweep, drafts, a failed and a diverged job, one that waits, one whose worker was killed, and one whose
workers were taken.

`write_history` writes all of it, at times before `now`, so that conditions such as `created > now - 7d` find what they
say. For the tasks of a researcher (`kit/researcher`) and for pictures; every job has a name of its own.
"""

import math
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.views import series_point
from kit.worlds.written_service import CHECKPOINT, INCIDENT, OPENED, RUNNING, SPEC, Service, formed, worker
from shoal_service.access_views import ClusterTokenRequest, TokenRequest
from shoal_service.artifact_views import ModelRequest
from shoal_service.core.access import Role
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.scheduling.market import Wait
from shoal_service.core.system_metrics import SystemSample
from shoal_service.reports import PendingEvent, PendingLog, SupervisorReports
from shoal_service.store import cluster_links, driving, models, queueing, reporting, submissions
from shoal_service.views import JobStatus, JobView
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, UserFailure
from shoal_workers.contract.media import FOLDER, MediaImage, MediaRecord, RecordName
from shoal_workers.contract.validation import Score, Standing

HOUR, DAY = 3600.0, 86400.0
STRAGGLER = 2
DIVERGED_AT = 70
MEDIA_STEPS = (10, 20, 30)
NUM_LINES = 600
TRACEBACK = """Traceback (most recent call last):
  File "task.py", line 41, in loss
    return criterion(model(batch["tokens"]), batch["labels"])
KeyError: 'labels'"""


@dataclass
class History:
    """Writes jobs at times before `now`, each with one attempt."""

    service: Service
    checkpoints: Path
    now: float
    _seq: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, ago_s: float, **changes: Any) -> JobView:
        spec = parse_spec({**SPEC, "name": name, **changes})
        write = self.service.store.writing(submissions.create)
        return write(spec, idempotency_key=None, now=self.now - ago_s)[0]

    def begin(self, job: JobView, ago_s: float, workers: int = 2) -> None:
        begin = self.service.store.writing(driving.begin_attempt, self.service.epoch)
        begin(job.id, workers=workers, now=self.now - ago_s)
        self._seq[job.id] = 0

    def report(self, job: JobView, ago_s: float, status: JobStatus, **parts: Any) -> None:
        self._seq[job.id] += 1
        reports = SupervisorReports(attempt=1, seq=self._seq[job.id], status=status, **parts)
        apply = self.service.store.writing(reporting.apply, self.service.epoch)
        apply(job.id, reports, now=self.now - ago_s)

    def train(self, job: JobView, ago_s: float, *, loss: float, step: int = 100, accuracy: float | None = None) -> None:
        """Begins it, and reports its last hundred steps, in which its loss falls to `loss`."""
        self.begin(job, ago_s)
        at, metrics = self.now - ago_s, {} if accuracy is None else {"accuracy": accuracy}
        share = 0.9 - (at % 7) / 20
        spent = {Category.PRODUCTIVE: 200 * share, Category.QUEUED: 200 * (1 - share)}
        status = RUNNING.model_copy(
            update={
                "step": step,
                "total_steps": job.spec.stop.steps if job.spec.stop is not None else None,
                "loss": loss,
                "workers": 2,
                "metrics": metrics,
                "goodput": Goodput(seconds=spent, total=200.0, ratio=share, at=at + 100, max_step=step),
            }
        )
        self.report(job, ago_s - 1, status, series=_curve(at, step, loss, workers=2, accuracy=accuracy))

    def save(self, job: JobView, ago_s: float, step: int, **parts: Any) -> None:
        status = self.service.store.get_job(job.id).status
        where = {"step": step, "url": str(self.checkpoints / job.id / f"step-{step}"), "committed_at": self.now - ago_s}
        self.report(job, ago_s, status, checkpoints=(CHECKPOINT.model_copy(update=where),), **parts)

    def end(self, job: JobView, ago_s: float, reason: EndReason = EndReason.FINISHED, **more: Any) -> None:
        status = self.service.store.get_job(job.id).status
        end = AttemptEnd(reason=reason, message=more.pop("message", "done"), step=status.step, **more)
        self.report(job, ago_s, status, end=end)


def _curve(
    at: float, step: int, loss: float, *, workers: int, accuracy: float | None = None
) -> tuple[SeriesPoint, ...]:
    """Every third step of the last hundred."""
    return tuple(
        series_point(
            one,
            at=at + one,
            loss=loss + 2 * (step - one) / step,
            lr=1e-3,
            tokens_per_s=1000.0,
            world_size=workers,
            metrics={} if accuracy is None else {"accuracy": accuracy * one / step},
        )
        for one in range(max(1, step - 99), step + 1, 3)
    )


def write_history(service: Service, checkpoints: Path, now: float) -> None:
    """`checkpoints`: where the service looks for files beside checkpoints."""
    history = History(service, checkpoints, now)
    _write_drafts(history)
    _write_models(history)
    _write_study(history)
    _write_sweep(history)
    _write_runaways(history)
    _write_struck(history)
    _write_fleet(history)
    _write_broken(history)
    _write_diverged(history)
    join = service.store.writing(cluster_links.create_token)
    join("default", ClusterTokenRequest(), by="ada", now=now - 50 * DAY)
    with service.client as client:
        client.create_token(TokenRequest(name="lost-laptop", role=Role.VIEWER))


def _write_drafts(history: History) -> None:
    for number in range(4):
        job = history.add(f"draft-{number}", 45 * DAY, labels={"draft": ""})
        history.train(job, 45 * DAY - HOUR, loss=6.0 + number)
        history.end(job, 44 * DAY)


def _write_models(history: History) -> None:
    """`base`, and those that differ from it; `long-tail` goes on from its checkpoint, and serving reads it."""
    speech = {"project": "speech", "user": "ada", "labels": {"team": "speech"}}
    base = history.add("base", 20 * DAY, optimizer={"lr": 1e-3}, **speech)
    history.train(base, 20 * DAY - HOUR, loss=2.0)
    history.save(base, 19.9 * DAY, 100)
    history.end(base, 19.8 * DAY)
    origin = {"continue_from": {"job": base.id, "step": 100}, "stop": {"steps": 200}}
    long_tail = None
    for name, ago_s, lr, loss in (
        ("old-best", 15 * DAY, 5e-3, 1.2),
        ("long-tail", 3 * DAY, 3e-3, 1.42),
        ("short-tail", 2.5 * DAY, 2e-3, 1.61),
        ("small-rate", 2 * DAY, 1e-4, 1.3),
    ):
        more, steps = (origin, 200) if name == "long-tail" else ({}, 100)
        job = history.add(name, ago_s, optimizer={"lr": lr}, **more, **speech)
        history.train(job, ago_s - HOUR, loss=loss, step=steps)
        history.save(job, ago_s - 2 * HOUR, steps)
        history.end(job, ago_s - 3 * HOUR)
        long_tail = job if name == "long-tail" else long_tail
    assert long_tail is not None
    for job, ago_s in ((base, 19 * DAY), (long_tail, 2.8 * DAY)):
        register = history.service.store.writing(models.register)
        register("transcriber", ModelRequest(job=job.id), by="ada", now=history.now - ago_s)
    history.service.store.writing(models.set_alias)("speech", "transcriber", "prod", 2)


def _write_study(history: History) -> None:
    """Ten jobs in two arms, with a metric of their own."""
    for number in range(10):
        arm = "long" if number % 2 else "short"
        labels = {"study": "warmup", "arm": arm}
        job = history.add(f"warmup-{number}", 4 * DAY - number * 60, project="vision", user="bo", labels=labels)
        history.train(job, 4 * DAY - HOUR, loss=2.5 - number / 20, accuracy=0.7 + 0.02 * number)
        history.end(job, 3.5 * DAY)


def _write_sweep(history: History) -> None:
    """Twelve jobs that train; their loss depends on the number of layers alone."""
    for number in range(12):
        layers = 2 + number % 3
        labels = {"lr": f"{10 ** (-5 + number / 6):.3g}", "layers": str(layers)}
        job = history.add(f"try-{number}", DAY - number, labels=labels, sweep={"name": "rates"})
        history.train(job, DAY - HOUR, loss=5.0 - layers + number / 1000, step=60)


def _write_runaways(history: History) -> None:
    for number in range(3):
        job = history.add(f"runaway-{number}", 6 * HOUR, optimizer={"lr": 1e-3})
        history.train(job, 5 * HOUR, loss=40.0 + number, step=1500)


def _write_struck(history: History) -> None:
    """Trains now with four workers; one was killed, one is slow; it has a log, media and a checkpoint."""
    job = history.add("struck", 3 * HOUR, project="vision", user="bo", labels={"team": "speech"})
    at = history.now - 2 * HOUR
    history.begin(job, 2 * HOUR, workers=4)
    incident = INCIDENT.model_copy(update={"at": at + 60, "recovery_s": 1.5, "steps_lost": 3})
    lines = tuple(
        PendingLog(
            at=at + number,
            rank=number % 4,
            worker_id=f"worker-{number % 4}",
            stream="stdout",
            text=f"ERROR: batch {number} was skipped" if number % 200 == 150 else f"batch {number} is done",
        )
        for number in range(NUM_LINES)
    )
    samples = tuple(
        SystemSample(
            at=at + 10 * number,
            generation=1,
            values={"busy": tuple(0.95 if rank == STRAGGLER else 0.4 for rank in range(4))},
        )
        for number in range(60)
    )
    curve = _curve(at, 30, 2.5, workers=4)
    status = RUNNING.model_copy(update={"step": 30, "loss": 2.5, "steps_lost": 3, "incidents": 1})
    history.report(job, HOUR, status, events=(formed(1, 4, 0), PendingEvent.of(OPENED, at + 60)), incidents=(incident,))
    workers = tuple(worker(rank) for rank in range(4))
    history.report(job, HOUR, status, logs=lines, series=curve, system=samples, workers=workers)
    history.save(job, HOUR / 2, 20, workers=workers)
    folder = history.checkpoints / job.id / FOLDER
    folder.mkdir(parents=True)
    for step in MEDIA_STEPS:
        _write_image(folder, step, at + step)


def _write_image(folder: Path, step: int, at: float) -> None:
    name = RecordName(step, 1, 1, 0, 1)
    image = png(48, 32, (40 + 6 * step, 120, 160))
    file = name.image(0, "png")
    (folder / file).write_bytes(image)
    record = MediaRecord(
        step=step,
        attempt=1,
        generation=1,
        rank=0,
        at=at,
        held_s=0.0001,
        images=(MediaImage(name="sample", file=file, bytes=len(image)),),
    )
    (folder / str(name)).write_text(record.model_dump_json())


def png(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    """A picture of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(colour) * width for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _write_fleet(history: History) -> None:
    """`urgent` has taken the workers of `giver`; `waits` is the first of the queue."""
    service = history.service
    giver = history.add("giver", HOUR, project="speech", user="ada")
    urgent = history.add("urgent", HOUR, project="vision", user="bo", priority=5)
    waits = history.add("waits", HOUR / 2, project="speech", user="ada")
    for job in (giver, urgent):
        history.train(job, HOUR - 60, loss=3.0, step=40)
    take = service.store.writing(driving.preempt, service.epoch)
    take(giver.id, reason="Priority 5 before 0.", beneficiary=urgent.id, now=history.now - HOUR / 2)
    place = Wait(waits.id, "Needs 2 workers; urgent holds them, at priority 5.", 1, (urgent.id,))
    with service.store.write(service.epoch) as tx:
        queueing.save_places(tx, queueing.differing(tx, [place], now=history.now - 60))


def _write_diverged(history: History) -> None:
    """Its loss is no number from step 70 of 100 on; its checkpoint of step 40 has the best validation."""
    job = history.add("diverged", 6 * DAY, labels={"study": "rates"}, optimizer={"lr": 1e-4}, batch={"global_size": 16})
    history.train(job, 5.9 * DAY, loss=2.2)
    curve = tuple(
        one.model_copy(update={"loss": math.nan}) if one.step >= DIVERGED_AT else one
        for one in _curve(history.now - 5.9 * DAY, 100, 2.2, workers=2)
    )
    scores = (Score(step=40, value=2.9), Score(step=100, value=9.5))
    status = history.service.store.get_job(job.id).status
    status = status.model_copy(update={"loss": None, "best": Standing(best=scores, keep=2, judged_step=100)})
    history.report(job, 5.8 * DAY, status, series=curve)
    for step in (40, 100):
        history.save(job, 5.7 * DAY, step)
    history.end(job, 5.6 * DAY)


def _write_broken(history: History) -> None:
    job = history.add("broken", 2 * HOUR, project="speech", user="ada", retry={"max_failures": 0})
    history.train(job, 1.9 * HOUR, loss=3.5, step=17)
    failure = UserFailure(
        type="KeyError", message="'labels'", traceback=TRACEBACK, phase="forward", ranks=(0, 1), step=17
    )
    lines = tuple(
        PendingLog(at=history.now - 6660 + n, rank=n % 2, worker_id=f"worker-{n % 2}", stream="stderr", text=text)
        for n, text in enumerate(("reads batch 16", "reads batch 17", "reads batch 18", "no labels in batch 18"))
    )
    history.report(job, 1.85 * HOUR, history.service.store.get_job(job.id).status, logs=lines)
    history.end(job, 1.8 * HOUR, EndReason.USER_ERROR, message="KeyError: 'labels'", failure=failure)
