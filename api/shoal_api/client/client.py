"""The Python client of the service: every verb of the REST API, typed and synchronous; retries are safe.

    with Client() as client:
        job = client.submit("job.yaml")
        for event in client.events(job.id, follow=True):
            print(event.type, event.data)
        print(client.wait(job.id).status.loss)

Each verb of the service is a method; those about the service itself are in `fleet.py`. Safe to use from several
threads. Never imports the HTTP edge or the store. JSON has null for a number that is not finite; here it becomes NaN or
infinity.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict, Unpack
from urllib.parse import quote

from shoal_api.answers import EventPage, LogPage, SpecCheck
from shoal_api.client.credentials import find_ca_file, find_token
from shoal_api.client.errors import Disconnected, NotFound, WaitTimeout
from shoal_api.client.fleet import DELETE_S, Fleet
from shoal_api.client.spec_documents import (
    SpecSource,
    prepare_document,
    read_document,
    with_absolute_paths,
    with_archive,
)
from shoal_api.client.transport import DEFAULT_RETRY, Credentials, RetryPolicy, Transport, follow_stream
from shoal_api.client.verbs import Endpoint, api_path, job_path, verb
from shoal_service.artifact_views import (
    AliasRequest,
    LineageView,
    MediaPage,
    ModelRequest,
    ModelVersion,
    OutputPage,
)
from shoal_service.control.code_archive import CodeArchive, pack
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.parity import DEFAULT_TOLERANCE
from shoal_service.core.system_metrics import SystemMetric
from shoal_service.fleet_views import DeletionView, DryRun, IslandRound, SweepView
from shoal_service.views import (
    CheckpointView,
    CodePatch,
    DataPatch,
    ElasticityPatch,
    EventView,
    ExtendRequest,
    IncidentView,
    JobOverview,
    JobPatch,
    JobSummary,
    JobView,
    LogView,
    MoveRequest,
    Page,
    ParityView,
    ProfileBody,
    ProfileView,
    SpecVersion,
    SweepRequest,
    SystemColumns,
    TakeRequest,
    VerificationView,
    WorkerView,
)
from shoal_workers.contract import JobState, Stacks
from shoal_workers.contract.data_preview import DataPreview

if TYPE_CHECKING:
    from shoal_service.control.planning import PlanAnswer


_STACKS_S = 35.0
_DELETE_CHECKPOINT_S = 125.0
_MEASURED = ("loss", "grad_norm")
_LARGEST = ("max_abs_diff", "max_rel_diff")
_COMPARED = {"loss": math.nan, "against": math.nan, "abs_diff": math.inf, "rel_diff": math.inf}


class Histories(Endpoint):
    """The verbs about what a job did and does. They raise what those of `Client` raise."""

    def events(self, job_id: str, *, after: int = 0, follow: bool = False) -> Iterator[EventView]:
        """Yield the events of a job after number `after`, without gaps, each once. `follow`: continue until the job has
        ended."""
        if follow:
            for event in follow_stream(self._transport, job_path(job_id, "events"), {"after": after}):
                yield EventView.model_validate_json(event.data)
            return
        while True:
            page = self.events_page(job_id, after=after, limit=1000)
            yield from page.items
            if len(page.items) < 1000:
                return
            after = page.next_after

    def events_page(self, job_id: str, *, after: int = 0, wait_s: float = 0.0, limit: int = 500) -> EventPage:
        """Return one page of events; the call is a long poll if `wait_s` is given."""
        params = {"after": after, "wait": min(wait_s, 60.0), "limit": limit}
        return self._get(job_path(job_id, "events"), EventPage, params, wait_s=wait_s)

    def logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        tail: int | None = None,
        after: int = 0,
        follow: bool = False,
    ) -> Iterator[LogView]:
        """Yield lines of a job's log. `tail`: only the last N lines. `follow`: continue until the job has ended."""
        path = job_path(job_id, "logs")
        if follow:
            params = {"rank": rank, "tail": tail, "after": after, "follow": True}
            for event in follow_stream(self._transport, path, params):
                yield LogView.model_validate_json(event.data)
            return
        while True:
            page = self._get(path, LogPage, {"rank": rank, "tail": tail, "after": after, "limit": 10_000})
            yield from page.items
            if tail is not None or len(page.items) < 10_000:
                return
            after = page.next_after

    def series(
        self, job_id: str, *, after_step: int = -1, until_step: int | None = None, max_points: int = 1000
    ) -> tuple[SeriesPoint, ...]:
        """Return the steps after `after_step` up to `until_step`; means if there are more than `max_points`."""
        params = {"after_step": after_step, "until_step": until_step, "max_points": max_points}
        return parse_series(self._transport.send("GET", job_path(job_id, "series"), params=params).content)

    def save_series(
        self, job_id: str, out: BinaryIO, *, format: str = "csv", after_step: int = -1, max_points: int | None = None
    ) -> None:
        """Write the series to a file, as `csv` or `parquet`: all stored steps, or `max_points` means.

        Raises:
            Disconnected: the answer broke off; `out` has a part of it.
        """
        params = {"format": format, "after_step": after_step, "max_points": max_points}
        self._save(job_path(job_id, "series"), out, params)

    @verb("GET /v1/jobs/{job_id}/overview")
    def overview(self, job_id: str) -> JobOverview:
        """Return everything that a page about the job shows, with at most 500 points of its series."""

    @verb("GET /v1/jobs/{job_id}/specs")
    def spec_versions(self, job_id: str) -> tuple[SpecVersion, ...]:
        """Return the versions of the job's spec, oldest first."""

    @verb("GET /v1/jobs/{job_id}/workers")
    def workers(self, job_id: str) -> tuple[WorkerView, ...]:
        """Return the workers of the newest attempt."""

    @verb("GET /v1/jobs/{job_id}/stacks", wait_s=_STACKS_S)
    def stacks(self, job_id: str, *, rank: int | None = None, native: bool = False) -> Stacks:
        """Return what the training threads of all workers do now, or that of one rank. `native` adds frames of native
        code."""

    @verb("GET /v1/jobs/{job_id}/system")
    def system(
        self, job_id: str, metric: SystemMetric = SystemMetric.BUSY, *, ranks: str = "", after: float = 0.0
    ) -> SystemColumns:
        """Return a system metric of each rank over time. `ranks`: only these, for example `0,4-7`; empty: all ranks.
        `after`: only what was measured after this time, in shorter intervals."""

    @verb("GET /v1/jobs/{job_id}/incidents")
    def incidents(self, job_id: str) -> tuple[IncidentView, ...]:
        """Return the failures and what they cost, oldest first."""

    @verb("GET /v1/jobs/{job_id}/rounds")
    def rounds(self, job_id: str) -> tuple[IslandRound, ...]:
        """Return the newest rounds in which islands merge with this job, the newest first."""

    @verb("GET /v1/jobs/{job_id}/checkpoints")
    def checkpoints(self, job_id: str) -> tuple[CheckpointView, ...]:
        """Return the durable checkpoints, oldest first; damaged and deleted ones too."""

    @verb("PUT /v1/jobs/{job_id}/checkpoints/{name}/pin")
    def pin_checkpoint(self, job_id: str, name: str) -> CheckpointView:
        """Retention does not delete the checkpoint of this name (`CheckpointView.name`) from now on."""

    @verb("DELETE /v1/jobs/{job_id}/checkpoints/{name}/pin")
    def unpin_checkpoint(self, job_id: str, name: str) -> CheckpointView:
        """Retention may delete the checkpoint of this name again."""

    def verify_checkpoint(self, job_id: str, name: str, *, wait_s: float = 30.0) -> VerificationView:
        """Read every byte of the checkpoint of this name and compare it with its marker. Begins or joins the
        verification, and waits up to `wait_s` seconds (60 at most): repeat the call while its state is `running`."""
        wait_s, path = min(wait_s, 60.0), job_path(job_id, "checkpoints", name, "verify")
        return self._call("POST", path, VerificationView, params={"wait": wait_s}, wait_s=wait_s)

    @verb("DELETE /v1/jobs/{job_id}/checkpoints/{name}", wait_s=_DELETE_CHECKPOINT_S)
    def delete_checkpoint(self, job_id: str, name: str) -> CheckpointView:
        """Delete the checkpoint of this name from the storage; it cannot be undone."""

    def parity(
        self, job_id: str, against: str, *, tolerance: float = DEFAULT_TOLERANCE, max_points: int = 0
    ) -> ParityView:
        """Compare the losses of two jobs. `max_points`: number of steps to list, those that differ most first."""
        params = {"against": against, "tolerance": tolerance, "max_points": max_points}
        response = self._transport.send("GET", job_path(job_id, "parity"), params=params)
        return parse_parity(response.content)

    @verb("POST /v1/jobs/{job_id}/profiles", body=ProfileBody, idempotent=False)
    def request_profile(self, job_id: str, *, steps: int = 3, rank: int = 0) -> ProfileView:
        """Profile `steps` steps of a rank of a running job, without stopping it. Returns at once: the profile has ended
        when the state of `profile` is not `requested` any more."""

    @verb("GET /v1/jobs/{job_id}/profiles")
    def profiles(self, job_id: str) -> tuple[ProfileView, ...]:
        """Return the newest 8 profiles, oldest first."""

    @verb("GET /v1/jobs/{job_id}/profiles/{number}")
    def profile(self, job_id: str, number: int) -> ProfileView:
        """Return one profile."""

    def save_profile_file(self, job_id: str, number: int, name: str, out: BinaryIO) -> None:
        """Write one of the `files` of a profile, as it is.

        Raises:
            Disconnected: the answer broke off; `out` has a part of it.
        """
        self._save(f"{job_path(job_id)}/profiles/{number}/files/{name}", out, raw=True)


def parse_series(body: bytes) -> tuple[SeriesPoint, ...]:
    """Parse the points of a response. A loss or gradient norm of null becomes NaN."""
    return tuple(_point(item) for item in json.loads(body)["items"])


def parse_parity(body: bytes) -> ParityView:
    """Parse a parity report. A loss of null becomes NaN, a difference of null becomes infinity."""
    report = json.loads(body)
    if report["steps_compared"]:
        report |= {key: math.inf for key in _LARGEST if report[key] is None}
    points = [
        {key: _COMPARED.get(key) if value is None else value for key, value in p.items()} for p in report["points"]
    ]
    return ParityView.model_validate(report | {"points": points})


def _point(item: dict[str, float | None]) -> SeriesPoint:
    measured = {key: math.nan for key in _MEASURED if item.get(key) is None}
    return SeriesPoint.model_validate(item | measured)


_NOT_MODIFIED = 304


class Artifacts(Endpoint):
    """They raise what those of `Client` raise."""

    @verb("GET /v1/jobs/{job_id}/media")
    def media(self, job_id: str, *, step: int | None = None, limit: int = 50, spread: bool = False) -> MediaPage:
        """Return what a job has logged besides numbers: the records of a step, else the newest ones, or, with `spread`,
        those of evenly spaced steps of the whole run."""

    @verb("GET /v1/jobs/{job_id}/media/{file}")
    def media_file(self, job_id: str, file: str) -> bytes:
        """Return the bytes of an image that a record of `media` names, as they were encoded."""

    @verb("GET /v1/jobs/{job_id}/data")
    def data(self, job_id: str) -> DataPreview:
        """Return what a job reads: samples with the tokens in the loss, lengths, labels, and what is left out."""

    @verb("GET /v1/jobs/{job_id}/files")
    def files(self, job_id: str, match: str = "**", *, limit: int = 1000) -> OutputPage:
        """Return what the program of a job has written below its directory, of files that match the pattern."""

    def save_file(self, job_id: str, name: str, out: BinaryIO) -> None:
        """Write a file of `files`, as it is.

        Raises:
            Disconnected: the answer broke off; `out` has a part of it.
        """
        self._save(f"{job_path(job_id)}/files/{quote(name)}", out, raw=True)

    @verb("GET /v1/jobs/{job_id}/lineage")
    def lineage(self, job_id: str) -> LineageView:
        """Return what the checkpoints of a job come from."""

    @verb("GET /v1/models")
    def models(self, *, project: str | None = None, name: str | None = None) -> tuple[ModelVersion, ...]:
        """Return the registered versions of models, the newest version of each first."""

    @verb("GET /v1/models/{project}/{name}/{which}")
    def model(self, project: str, name: str, which: str = "latest") -> ModelVersion:
        """Return a version of a model, by number or alias."""

    def follow_model(
        self, project: str, name: str, which: str = "latest", *, every_s: float = 10.0
    ) -> Iterator[ModelVersion]:
        """Yield the version that an alias names, then each other one that it names later; for servers of models.

        It asks every `every_s` seconds with the ETag of the last answer. It goes on while the service cannot be
        reached, or the alias names nothing after it has named something; `close` ends it.
        """
        path, tag, newest = api_path("models", project, name, which), "", None
        while True:
            try:
                response = self._transport.send("GET", path, headers={"If-None-Match": tag} if tag else None)
            except (Disconnected, NotFound):
                if newest is None:
                    raise
            else:
                if response.status_code != _NOT_MODIFIED:
                    tag, version = response.headers["ETag"], ModelVersion.model_validate_json(response.content)
                    if version.version != newest:
                        newest = version.version
                        yield version
            if not self._transport.pause(every_s):
                return

    @verb("POST /v1/models/{name}/versions")
    def register_model(self, name: str, request: ModelRequest) -> ModelVersion:
        """Register a checkpoint as the next version of a model."""

    @verb("PUT /v1/models/{project}/{name}/aliases/{alias}", body=AliasRequest)
    def set_model_alias(self, project: str, name: str, alias: str, version: int) -> ModelVersion:
        """Let an alias name this version from now on."""

    @verb("DELETE /v1/models/{project}/{name}/aliases/{alias}")
    def remove_model_alias(self, project: str, name: str, alias: str) -> None:
        """Delete an alias; the version stays."""

    @verb("DELETE /v1/models/{project}/{name}/versions/{version}")
    def remove_model(self, project: str, name: str, version: int) -> None:
        """Take a version out of the registry; its checkpoint stays."""


DEFAULT_URL = "http://127.0.0.1:8470"
_LONG_POLL_S = 30.0
_SWEEP_S = 120.0
"""Seconds to wait for the answer: every job is checked, and all are stored in one transaction."""


class JobsQuery(TypedDict, total=False):
    """Which jobs a list has, in which order, and with which values."""

    state: Collection[JobState]
    project: str | None
    """Only jobs of this project; None selects all projects."""
    user: str | None
    """Only jobs of this user; None selects all users."""
    label: Collection[str]
    """NAME, !NAME, NAME=VALUE or NAME!=VALUE, of which all must match."""
    search: str
    """Words that must all be in name, id, project, user or labels."""
    where: str
    """A condition, such as `lr > 1e-3 and state == "FAILED"`; docs/submitting.md has the language."""
    sort: str
    """Names, separated by commas; a dash before one: the largest first."""
    columns: str
    """Names whose values each job has in `values`."""
    archived: bool
    """Also archived jobs."""


class Client(Histories, Fleet, Artifacts):
    """Every method raises `ApiError` if the service refuses a request, and `Disconnected` if it does not answer."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | Path | None = None,
        timeout_s: float = 30.0,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        """`base_url`: None for SHOAL_URL, else a server of this machine.
        `token`: None for the one that `credentials.find_token` finds for this address, now or at a later call.
        `ca_file`: the certificates, in PEM, of authorities that the server's may come from; None for SHOAL_CA_FILE,
        else the usual ones."""
        base_url = base_url or os.environ.get("SHOAL_URL", DEFAULT_URL)
        find = (lambda: token) if token else partial(find_token, base_url)
        credentials = Credentials(find, Path(ca_file) if ca_file is not None else find_ca_file())
        super().__init__(Transport(base_url, timeout_s, retry, credentials))

    @property
    def base_url(self) -> str:
        return self._transport.base_url

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Iterators that other threads follow end as well."""
        self._transport.close()

    def submit(
        self,
        spec: SpecSource,
        *,
        idempotency_key: str | None = None,
        on_packed: Callable[[CodeArchive], None] | None = None,
    ) -> JobView:
        """Submit a spec, or a YAML or JSON file that holds one. A local `code.working_dir` is packed and uploaded. A
        relative `checkpoint.url` starts at the working directory, if the service runs on this machine. A spec without
        a `user` gets the login name.

        Without a key a new one is generated. A retry after a network error therefore never creates a second job.

        Args:
            on_packed: called with the packed working directory, before it is uploaded.

        Raises:
            InvalidSpec: the spec is not valid; the error lists every problem.
            SpecError: the file is not valid YAML or JSON.
            CodeArchiveError: the working directory cannot be packed.
        """
        document, base = prepare_document(spec, self.base_url)
        upload = partial(self.upload_code, on_packed=on_packed)
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return self._call("POST", "/v1/jobs", JobView, body=with_archive(document, base, upload), headers=headers)

    def submit_sweep(self, sweep: SweepRequest) -> SweepView:
        """Submit a job for each combination of the grid, all or none; the jobs are in the order of the grid. The spec
        is prepared as by `submit`; its `code.working_dir` is relative to the current directory.

        A sweep without a name gets one here. A retry after a network error therefore never creates a second sweep.

        Raises:
            InvalidSpec: the spec of a job is not valid.
            BadRequest: the grid is not valid.
            Conflict: the project has another sweep with this name, or the queue has not enough room.
            CodeArchiveError: the working directory cannot be packed.
        """
        from shoal_service.control.submission import fill_name  # loads the planner, which no other verb needs

        document, base = prepare_document(sweep.spec, self.base_url)
        document = with_archive(document, base, self.upload_code)
        named = fill_name(sweep).model_copy(update={"spec": document})
        return self._call("POST", "/v1/sweeps", SweepView, body=named, wait_s=_SWEEP_S)

    def dry_run(
        self,
        spec: SpecSource,
        *,
        on_packed: Callable[[CodeArchive], None] | None = None,
    ) -> DryRun:
        """Return what `submit` would do with the spec, or how it would be refused: every check, the layouts, the
        expected start. Nothing is stored or uploaded; a local `code.working_dir` is packed.

        Raises: as `submit`.
        """
        document, base = prepare_document(spec, self.base_url)
        packed = with_archive(document, base, lambda directory: _packed(directory, on_packed).sha256)
        return self._call("POST", "/v1/jobs/dry-run", DryRun, body=packed, params={"uploads": packed is not document})

    def validate(self, spec: SpecSource) -> SpecCheck:
        """Check a spec; nothing is submitted or uploaded."""
        document = with_absolute_paths(read_document(spec)[0], self.base_url, Path.cwd())
        return self._call("POST", "/v1/specs/validate", SpecCheck, body=document)

    def plan(
        self,
        spec: SpecSource,
        *,
        workers: int | None = None,
        gpus: int | None = None,
        gpu: str | None = None,
        top: int = 10,
        racks: Sequence[Sequence[int]] = (),
    ) -> PlanAnswer:
        """Plan a spec for a number of workers, or for `gpus` GPUs of type `gpu`; nothing is submitted.

        Args:
            racks: by rack, the number of workers on each of its nodes.

        Raises:
            InvalidSpec: the spec is not valid; the error lists every problem.
        """
        from shoal_service.control.planning import PlanAnswer, PlanRequest  # loads numpy, which no other verb needs

        request = PlanRequest(
            spec=read_document(spec)[0],
            workers=workers,
            gpus=gpus,
            gpu=gpu,
            top=top,
            racks=tuple(tuple(nodes) for nodes in racks),
        )
        return self._call("POST", "/v1/plans", PlanAnswer, body=request)

    def jobs(self, *, limit: int | None = None, **query: Unpack[JobsQuery]) -> Iterator[JobSummary]:
        """Yield jobs, newest first if `sort` names nothing, page by page, at most `limit`."""
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            page = self.jobs_page(limit=500 if left is None else min(left, 500), cursor=cursor, **query)
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return
            left = None if left is None else left - len(page.items)

    def jobs_page(self, *, limit: int = 100, cursor: str | None = None, **query: Unpack[JobsQuery]) -> Page[JobSummary]:
        return self._get("/v1/jobs", Page[JobSummary], {**_query_params(query), "limit": limit, "cursor": cursor})

    def export_jobs(
        self,
        out: BinaryIO,
        *,
        format: str = "csv",
        job: Collection[str] = (),
        limit: int | None = None,
        **query: Unpack[JobsQuery],
    ) -> int:
        """Write jobs to a file, as `csv` or `parquet`, a row for each, and return their number. The service makes the
        file, so it need not fit into memory. `columns` are those after id, name and state; empty: the fields of a
        `JobSummary`.

        Args:
            job: only the jobs with these ids, 500 at most, also if they are archived.

        Raises:
            Disconnected: the answer broke off; `out` has a part of it.
        """
        params = {**_query_params(query), "format": format, "job": list(job), "limit": limit}
        return int(self._save("/v1/job-export", out, params)["X-Total-Count"])

    @verb("GET /v1/jobs/{job_id}")
    def job(self, job_id: str) -> JobView:
        """Return a job: its spec and its status."""

    def patch(self, job_id: str, patch: JobPatch, *, if_match: str | None = None) -> JobView:
        """Change a job. `if_match`: the `etag` that the job must still have.

        Raises:
            PreconditionFailed: the job was changed in the meantime.
        """
        headers = {"If-Match": f'"{if_match}"'} if if_match is not None else {}
        body = patch.model_dump(mode="json", exclude_unset=True)
        return self._call("PATCH", job_path(job_id), JobView, body=body, headers=headers, idempotent=if_match is None)

    def update_code(self, job_id: str, working_dir: str | Path, *, if_match: str | None = None) -> JobView:
        """Pack and upload a directory as the new code of a job, which follows while it trains.

        Raises:
            CodeArchiveError: the directory cannot be packed.
        """
        patch = JobPatch(code=CodePatch(archive=self.upload_code(working_dir)))
        return self.patch(job_id, patch, if_match=if_match)

    def change_weights(self, job_id: str, weights: Mapping[str, float], *, at_step: int | None = None) -> JobView:
        """Give the sources of a job's mixture other weights, while it trains.

        Args:
            weights: of each source, by its name or path. A source with weight 0 is not read any more.
            at_step: the first step with them. By default the service chooses the first one of which all workers learn
                in time; `spec.data["changes"]` of the answer names it.
        """
        return self.patch(job_id, JobPatch(data=DataPatch(weights=dict(weights), at_step=at_step)))

    def scale(
        self,
        job_id: str,
        *,
        min_workers: int | None = None,
        max_workers: int | None = None,
        standby: int | None = None,
    ) -> JobView:
        """Change how far a job may shrink and grow, while it trains."""
        elasticity = ElasticityPatch(min_workers=min_workers, max_workers=max_workers, standby=standby)
        return self.patch(job_id, JobPatch(elasticity=elasticity))

    @verb("POST /v1/jobs/{job_id}/pause")
    def pause(self, job_id: str) -> JobView:
        """Let a job save a checkpoint and release its workers until `resume`."""

    @verb("POST /v1/jobs/{job_id}/resume")
    def resume(self, job_id: str) -> JobView:
        """Put a paused job back into the queue."""

    @verb("POST /v1/jobs/{job_id}/cancel")
    def cancel(self, job_id: str) -> JobView:
        """End a job. Its checkpoints are kept."""

    @verb("POST /v1/jobs/{job_id}/archive")
    def archive(self, job_id: str) -> JobView:
        """Take a job that has ended out of the lists of jobs. It is kept, and found with `archived`."""

    @verb("POST /v1/jobs/{job_id}/unarchive")
    def unarchive(self, job_id: str) -> JobView:
        """Take a job back into the lists of jobs."""

    @verb("POST /v1/jobs/{job_id}/extend", body=ExtendRequest, idempotent=False)
    def extend(self, job_id: str, steps: int) -> JobView:
        """Let a job go on to `steps` steps in all; an ended one returns to the queue."""

    @verb("POST /v1/jobs/{job_id}/retry", idempotent=False)
    def retry(self, job_id: str) -> JobView:
        """Let a failed job try again, from its newest checkpoint."""

    def move(self, job_id: str, to: str, *, at_once: bool = False, if_match: str | None = None) -> JobView:
        """Run a job in the cluster `to`: an attempt elsewhere saves and ends, and the job goes on there. With `any` the
        scheduler chooses the cluster, and an attempt stays where it is.

        Args:
            at_once: the attempt does not train on until the job would start there.

        Raises:
            Conflict: the job could not run there, or has ended; the message names the way out.
            PreconditionFailed: the job was changed in the meantime.
        """
        headers = {"If-Match": f'"{if_match}"'} if if_match is not None else {}
        return self._call(
            "POST",
            job_path(job_id, "move"),
            JobView,
            body=MoveRequest(to=to, at_once=at_once),
            headers=headers,
            idempotent=if_match is None,
        )

    @verb("POST /v1/jobs/{job_id}/take", body=TakeRequest, wait_s=DELETE_S)
    def take(self, job_id: str, step: int) -> JobView:
        """Choose the checkpoint to go on from, and delete the later ones. Step 0 starts the job over."""

    @verb("DELETE /v1/jobs/{job_id}", wait_s=DELETE_S)
    def delete_job(self, job_id: str, *, checkpoints: bool = True) -> DeletionView:
        """Delete a job that has ended, with its history, and with `checkpoints` its files in the storage too. It cannot
        be undone. `finished_at` is None if the storage does not answer: the server goes on later."""

    def wait(
        self,
        job_id: str,
        *,
        until: Callable[[JobView], bool] | Collection[JobState] | None = None,
        timeout_s: float | None = None,
    ) -> JobView:
        """Wait, by long poll, until a job has ended or `until` is reached: one of some states, or a predicate.

        A predicate is evaluated after every event of the job. The method always returns at the end of the job.

        Raises:
            WaitTimeout: `timeout_s` has passed.
        """
        deadline_mono = None if timeout_s is None else time.monotonic() + timeout_s
        after = 0
        job = self.job(job_id)
        while not (job.status.state.ended or _is_reached(job, until)):
            left_s = _LONG_POLL_S if deadline_mono is None else min(_LONG_POLL_S, deadline_mono - time.monotonic())
            if left_s <= 0:
                raise WaitTimeout(job, timeout_s or 0.0)
            after = self.events_page(job_id, after=after, wait_s=left_s, limit=1000).next_after
            job = self.job(job_id)
        return job

    def upload_code(self, working_dir: str | Path, *, on_packed: Callable[[CodeArchive], None] | None = None) -> str:
        """Pack a directory and upload it. Returns its sha256 for `code.archive`."""
        archive = _packed(working_dir, on_packed)
        headers = {"Content-Type": "application/zip"}
        self._transport.send("PUT", f"/v1/code/{archive.sha256}", headers=headers, content=archive.data)
        return archive.sha256


def _query_params(query: JobsQuery) -> dict[str, Any]:
    """Return the parameters of a request. Raises TypeError for a name that is no key of `JobsQuery`."""
    if unknown := query.keys() - JobsQuery.__annotations__.keys():
        raise TypeError(f"a list of jobs has no {', '.join(sorted(unknown))}")
    params = {name: value if value not in ("", False) else None for name, value in query.items()}
    return params | {"state": [state.value for state in query.get("state", ())], "label": list(query.get("label", ()))}


def _packed(working_dir: str | Path, on_packed: Callable[[CodeArchive], None] | None) -> CodeArchive:
    archive = pack(working_dir)
    if on_packed is not None:
        on_packed(archive)
    return archive


def _is_reached(job: JobView, until: Callable[[JobView], bool] | Collection[JobState] | None) -> bool:
    if until is None:
        return False
    return until(job) if callable(until) else job.status.state in until
