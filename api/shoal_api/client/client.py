"""The Python client of the service: every verb of the REST API, typed and synchronous; retries are safe.

    with Client() as client:
        job = client.submit("job.yaml")
        for event in client.events(job.id, follow=True):
            print(event.type, event.data)
        print(client.wait(job.id).status.loss)

Safe to use from several threads. Never imports the HTTP edge or the store.

`read_document` reads the spec that a user gives; the other functions complete the document that is sent, since only the
client knows the user's working directory, login name and files. The server validates it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict, Unpack

from shoal_api.answers import SpecCheck
from shoal_api.client.credentials import find_ca_file, find_token
from shoal_api.client.errors import WaitTimeout
from shoal_api.client.fleet import Fleet
from shoal_api.client.histories import Artifacts, Histories
from shoal_api.client.transport import DEFAULT_RETRY, Credentials, RetryPolicy, Transport, job_path
from shoal_service.control.code_archive import CodeArchive, pack
from shoal_service.fleet_views import DeletionView, DryRun, SweepView
from shoal_service.views import (
    CodePatch,
    DataPatch,
    ElasticityPatch,
    ExtendRequest,
    JobPatch,
    JobSummary,
    JobView,
    MoveRequest,
    Page,
    SweepRequest,
    TakeRequest,
)
from shoal_workers.contract import JobSpec, JobState

if TYPE_CHECKING:
    from shoal_service.control.planning import PlanAnswer
import getpass
import re
from urllib.parse import urlsplit

from shoal_api.client.credentials import LOOPBACK
from shoal_service.control.spec_io import SpecFormat, decode
from shoal_workers.contract import is_user
from shoal_workers.contract.checks.places import absolute

DEFAULT_URL = "http://127.0.0.1:8470"
_LONG_POLL_S = 30.0
_DELETE_S = 120.0
"""Seconds to wait for the answer: files are deleted first."""
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
        spec: JobSpec | Mapping[str, Any] | str | Path,
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
        document, base = read_document(spec)
        document = with_user(with_absolute_paths(document, self.base_url, Path.cwd()))
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

        document = with_user(with_absolute_paths(sweep.spec, self.base_url, Path.cwd()))
        document = with_archive(document, Path(), self.upload_code)
        named = fill_name(sweep).model_copy(update={"spec": document})
        return self._call("POST", "/v1/sweeps", SweepView, body=named, wait_s=_SWEEP_S)

    def dry_run(
        self,
        spec: JobSpec | Mapping[str, Any] | str | Path,
        *,
        on_packed: Callable[[CodeArchive], None] | None = None,
    ) -> DryRun:
        """Return what `submit` would do with the spec, or how it would be refused: every check, the layouts, the
        expected start. Nothing is stored or uploaded; a local `code.working_dir` is packed.

        Raises: as `submit`.
        """
        document, base = read_document(spec)
        document = with_user(with_absolute_paths(document, self.base_url, Path.cwd()))
        packed = with_archive(document, base, lambda directory: _packed(directory, on_packed).sha256)
        params = {"uploads": packed is not document}
        return self._call("POST", "/v1/jobs/dry-run", DryRun, body=packed, params=params)

    def validate(self, spec: JobSpec | Mapping[str, Any] | str | Path) -> SpecCheck:
        """Check a spec; nothing is submitted or uploaded."""
        document = with_absolute_paths(read_document(spec)[0], self.base_url, Path.cwd())
        return self._call("POST", "/v1/specs/validate", SpecCheck, body=document)

    def plan(
        self,
        spec: JobSpec | Mapping[str, Any] | str | Path,
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

    def job(self, job_id: str) -> JobView:
        return self._get(job_path(job_id), JobView)

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

    def pause(self, job_id: str) -> JobView:
        return self._post(job_id, "pause")

    def resume(self, job_id: str) -> JobView:
        return self._post(job_id, "resume")

    def cancel(self, job_id: str) -> JobView:
        return self._post(job_id, "cancel")

    def archive(self, job_id: str) -> JobView:
        """Take a job that has ended out of the lists of jobs. It is kept, and found with `archived`."""
        return self._post(job_id, "archive")

    def unarchive(self, job_id: str) -> JobView:
        """Take a job back into the lists of jobs."""
        return self._post(job_id, "unarchive")

    def extend(self, job_id: str, steps: int) -> JobView:
        """Let a job go on to `steps` steps in all; an ended one returns to the queue."""
        return self._call(
            "POST", job_path(job_id, "extend"), JobView, body=ExtendRequest(steps=steps), idempotent=False
        )

    def retry(self, job_id: str) -> JobView:
        """Let a failed job try again, from its newest checkpoint."""
        return self._call("POST", job_path(job_id, "retry"), JobView, idempotent=False)

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

    def take(self, job_id: str, step: int) -> JobView:
        """Choose the checkpoint to go on from, and delete the later ones. Step 0 starts the job over."""
        return self._call("POST", job_path(job_id, "take"), JobView, body=TakeRequest(step=step), wait_s=_DELETE_S)

    def delete_job(self, job_id: str, *, checkpoints: bool = True) -> DeletionView:
        """Delete a job that has ended, with its history, and with `checkpoints` its files in the storage too. It cannot
        be undone. `finished_at` is None if the storage does not answer: the server goes on later."""
        params = {"checkpoints": checkpoints}
        return self._call("DELETE", job_path(job_id), DeletionView, params=params, wait_s=_DELETE_S)

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

    def _post(self, job_id: str, verb: str) -> JobView:
        return self._call("POST", job_path(job_id, verb), JobView)


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


def read_document(spec: JobSpec | Mapping[str, Any] | str | Path) -> tuple[Any, Path]:
    """Return the spec as plain values, and the directory that its relative paths start from."""
    if isinstance(spec, JobSpec):
        return spec.model_dump(mode="json", exclude_unset=True), Path()
    if isinstance(spec, Mapping):
        return dict(spec), Path()
    path = Path(spec)
    return decode(path.read_text(encoding="utf-8"), SpecFormat.of(path.name))[0], path.parent


_PATHS = ("paths", "validation_paths")


def with_absolute_paths(document: Any, server_url: str, base: Path) -> Any:
    """Return the document with a relative `checkpoint.url` made absolute: it starts at `base`, the user's working
    directory. So do `data.paths` and `data.validation_paths`, unless the job has code, whose directory has its data.

    Nothing is changed for a server on another machine, which refuses a relative URL with the reason.
    """
    if not isinstance(document, dict) or urlsplit(server_url).hostname not in LOOPBACK:
        return document
    checkpoint, data = document.get("checkpoint"), document.get("data")
    if isinstance(checkpoint, dict) and isinstance(checkpoint.get("url"), str):
        document = document | {"checkpoint": {**checkpoint, "url": absolute(checkpoint["url"], base)}}
    if isinstance(data, dict) and "code" not in document:
        named = {key: data[key] for key in _PATHS if isinstance(data.get(key), list)}
        made = {
            key: [absolute(path, base) if isinstance(path, str) else path for path in paths]
            for key, paths in named.items()
        }
        document = document | {"data": data | made}
    return document


def with_user(document: Any) -> Any:
    """Return the document with the login name as `user`, unless it names one."""
    if not isinstance(document, dict) or "user" in document:
        return document
    name = user_of_login(_login_name())
    return document if name is None else document | {"user": name}


def user_of_login(login: str) -> str | None:
    """Return a login name in the letters that a user may have: "ada lovelace" becomes ada-lovelace. None if nothing is
    left of it."""
    name = re.sub(r"[^A-Za-z0-9._@-]+", "-", login).strip("-._@")[:63].rstrip("-._@")
    return name if is_user(name) else None


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container whose user id has no entry
        return ""


def with_archive(document: Any, base: Path, pack: Callable[[Path], str]) -> Any:
    """Return the document with the sha256 of an archive instead of the working directory, if it names one. `pack`
    packs a directory and returns the sha256."""
    code = document.get("code") if isinstance(document, dict) else None
    if not isinstance(code, dict) or not isinstance(code.get("working_dir"), str) or code.get("archive"):
        return document
    working_dir = base / Path(code["working_dir"]).expanduser()
    return document | {"code": {**code, "working_dir": None, "archive": pack(working_dir)}}
