"""The Python client of the service: every verb of the REST API, typed, synchronous, safe to repeat.

    with Client() as client:
        job = client.submit("job.yaml")
        for event in client.events(job.id, follow=True):
            print(event.type, event.data)
        print(client.wait(job.id).status.loss)

Usable from several threads. Imports neither the HTTP edge nor the store.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from shoal_api.answers import EventPage, Health, LogPage, Readiness, SpecCheck
from shoal_api.client.errors import WaitTimeout
from shoal_api.client.follow import follow as follow_stream
from shoal_api.client.series import parse_parity, parse_series
from shoal_api.client.transport import DEFAULT_RETRY, RetryPolicy, Transport
from shoal_service.control.code_archive import pack
from shoal_service.control.spec_io import SpecFormat, decode
from shoal_service.core.parity import DEFAULT_TOLERANCE
from shoal_service.views import (
    CheckpointView,
    ClusterView,
    DrainRequest,
    ElasticityPatch,
    EventView,
    IncidentView,
    JobPatch,
    JobSummary,
    JobView,
    LogView,
    NodeView,
    Page,
    ParityView,
    SeriesPoint,
    WorkerView,
)
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec

if TYPE_CHECKING:
    from shoal_service.control.planning_request import PlanAnswer

M = TypeVar("M", bound=BaseModel)
DEFAULT_URL = "http://127.0.0.1:8470"
_LONG_POLL_S = 30.0
_JSON = {"Content-Type": "application/json"}


class Client:
    """Every method raises `ApiError` when the service refuses and `Disconnected` when it does not answer."""

    def __init__(
        self, base_url: str = DEFAULT_URL, *, timeout_s: float = 30.0, retry: RetryPolicy = DEFAULT_RETRY
    ) -> None:
        self._transport = Transport(base_url, timeout_s, retry)

    @property
    def base_url(self) -> str:
        return self._transport.base_url

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends iterators that other threads follow, too."""
        self._transport.close()

    # Jobs

    def submit(self, spec: JobSpec | Mapping[str, Any] | str | Path, *, idempotency_key: str | None = None) -> JobView:
        """Submit a spec, or a YAML or JSON file that holds one. A local `code.working_dir` is packed and uploaded.

        Without a key a fresh one is made, so that this call never makes two jobs, whatever the network does.

        Raises:
            InvalidSpec: everything that is wrong with it.
            SpecError: the file is not valid YAML or JSON.
            CodeArchiveError: the working directory cannot be packed.
        """
        document, base = _document_of(spec)
        body = json.dumps(self._with_archive(document, base)).encode()
        headers = _JSON | {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        response = self._transport.send("POST", "/v1/jobs", headers=headers, content=body)
        return JobView.model_validate_json(response.content)

    def validate(self, spec: JobSpec | Mapping[str, Any] | str | Path) -> SpecCheck:
        """What is wrong with a spec; nothing is submitted or uploaded."""
        body = json.dumps(_document_of(spec)[0]).encode()
        response = self._transport.send("POST", "/v1/specs/validate", headers=_JSON, content=body)
        return SpecCheck.model_validate_json(response.content)

    def plan(
        self,
        spec: JobSpec | Mapping[str, Any] | str | Path,
        *,
        workers: int | None = None,
        gpus: int | None = None,
        gpu: str | None = None,
        top: int = 10,
    ) -> PlanAnswer:
        """What the planner makes of a spec with so many workers, or so many GPUs of a kind; nothing is submitted.

        Raises:
            InvalidSpec: everything that is wrong with it.
        """
        from shoal_service.control.planning_request import (  # loads numpy, which no other verb needs
            PlanAnswer,
            PlanRequest,
        )

        asked = PlanRequest(spec=_document_of(spec)[0], workers=workers, gpus=gpus, gpu=gpu, top=top)
        body = asked.model_dump_json().encode()
        response = self._transport.send("POST", "/v1/plans", headers=_JSON, content=body)
        return PlanAnswer.model_validate_json(response.content)

    def jobs(self, *, state: Collection[JobState] = (), limit: int | None = None) -> Iterator[JobSummary]:
        """Jobs, newest first, page by page; at most `limit`."""
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            page_size = 500 if left is None else min(left, 500)
            page = self.jobs_page(state=state, limit=page_size, cursor=cursor)
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return
            left = None if left is None else left - len(page.items)

    def jobs_page(
        self, *, state: Collection[JobState] = (), limit: int = 100, cursor: str | None = None
    ) -> Page[JobSummary]:
        params = {"state": [one.value for one in state], "limit": limit, "cursor": cursor}
        return self._get("/v1/jobs", Page[JobSummary], params)

    def job(self, job_id: str) -> JobView:
        return self._get(_path(job_id), JobView)

    def patch(self, job_id: str, patch: JobPatch, *, if_match: str | None = None) -> JobView:
        """Change what may change of a job. `if_match`: the `etag` that it must still have.

        Raises:
            PreconditionFailed: somebody changed it meanwhile.
        """
        headers = _JSON | ({"If-Match": f'"{if_match}"'} if if_match is not None else {})
        body = patch.model_dump_json(exclude_none=True).encode()
        response = self._transport.send(
            "PATCH", _path(job_id), headers=headers, content=body, idempotent=if_match is None
        )
        return JobView.model_validate_json(response.content)

    def scale(
        self,
        job_id: str,
        *,
        min_workers: int | None = None,
        max_workers: int | None = None,
        standby: int | None = None,
    ) -> JobView:
        """Change how far a job may shrink and grow; it goes on training."""
        elasticity = ElasticityPatch(min_workers=min_workers, max_workers=max_workers, standby=standby)
        return self.patch(job_id, JobPatch(elasticity=elasticity))

    def pause(self, job_id: str) -> JobView:
        return self._ask(job_id, "pause")

    def resume(self, job_id: str) -> JobView:
        return self._ask(job_id, "resume")

    def cancel(self, job_id: str) -> JobView:
        return self._ask(job_id, "cancel")

    def wait(
        self,
        job_id: str,
        *,
        until: Callable[[JobView], bool] | Collection[JobState] | None = None,
        timeout_s: float | None = None,
    ) -> JobView:
        """Wait, by long poll, until a job has ended, is in one of some states, or satisfies a predicate.

        A predicate is asked after every event of the job. Returns at the job's end in any case.

        Raises:
            WaitTimeout
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

    # Histories

    def events(self, job_id: str, *, after: int = 0, follow: bool = False) -> Iterator[EventView]:
        """A job's events after a number: gap-free, each once. `follow`: go on until the job has ended."""
        if follow:
            for event in follow_stream(self._transport, f"{_path(job_id)}/events", {"after": after}):
                yield EventView.model_validate_json(event.data)
            return
        while True:
            page = self.events_page(job_id, after=after, limit=1000)
            yield from page.items
            if len(page.items) < 1000:
                return
            after = page.next_after

    def events_page(self, job_id: str, *, after: int = 0, wait_s: float = 0.0, limit: int = 500) -> EventPage:
        """One answer; with `wait_s` a long poll."""
        params = {"after": after, "wait": min(wait_s, 60.0), "limit": limit}
        return self._get(f"{_path(job_id)}/events", EventPage, params, wait_s=wait_s)

    def logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        tail: int | None = None,
        after: int = 0,
        follow: bool = False,
    ) -> Iterator[LogView]:
        """Lines of a job's log. `tail`: begin with the last so many. `follow`: go on until the job has ended."""
        path = f"{_path(job_id)}/logs"
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

    def series(self, job_id: str, *, after_step: int = -1, max_points: int = 1000) -> tuple[SeriesPoint, ...]:
        params = {"after_step": after_step, "max_points": max_points}
        return parse_series(self._transport.send("GET", f"{_path(job_id)}/series", params=params).content)

    def workers(self, job_id: str) -> tuple[WorkerView, ...]:
        return self._get(f"{_path(job_id)}/workers", Page[WorkerView]).items

    def incidents(self, job_id: str) -> tuple[IncidentView, ...]:
        return self._get(f"{_path(job_id)}/incidents", Page[IncidentView]).items

    def checkpoints(self, job_id: str) -> tuple[CheckpointView, ...]:
        return self._get(f"{_path(job_id)}/checkpoints", Page[CheckpointView]).items

    def parity(
        self, job_id: str, against: str, *, tolerance: float = DEFAULT_TOLERANCE, max_points: int = 0
    ) -> ParityView:
        """How far the losses of two jobs differ. `max_points`: list so many steps, of long series the worst ones."""
        params = {"against": against, "tolerance": tolerance, "max_points": max_points}
        answer = self._transport.send("GET", f"{_path(job_id)}/parity", params=params)
        return parse_parity(answer.content)

    # The service

    def cluster(self) -> ClusterView:
        return self._get("/v1/cluster", ClusterView)

    def nodes(self) -> tuple[NodeView, ...]:
        return self._get("/v1/nodes", Page[NodeView]).items

    def node(self, node_id: str) -> NodeView:
        return self._get(_node_path(node_id), NodeView)

    def drain(self, node_id: str, *, reason: str = "drain requested", deadline_s: float | None = None) -> NodeView:
        """Jobs leave the node at their next step boundary, and nothing new is placed there. `deadline_s`: it goes away
        in so many seconds."""
        body = DrainRequest(reason=reason, deadline_s=deadline_s).model_dump_json().encode()
        response = self._transport.send("POST", f"{_node_path(node_id)}/drain", headers=_JSON, content=body)
        return NodeView.model_validate_json(response.content)

    def undo_drain(self, node_id: str) -> NodeView:
        """The node may be used again."""
        response = self._transport.send("DELETE", f"{_node_path(node_id)}/drain")
        return NodeView.model_validate_json(response.content)

    def health(self) -> Health:
        """The process answers."""
        return self._get("/healthz", Health)

    def ready(self) -> Readiness:
        """Raises ServerError with code not-ready: the store or the cluster cannot be reached."""
        return Readiness.model_validate_json(self._transport.send("GET", "/readyz", idempotent=False).content)

    def metrics(self) -> str:
        """In Prometheus' text format."""
        return self._transport.send("GET", "/metrics").text

    def upload_code(self, working_dir: str | Path) -> str:
        """Pack a directory and store it; its sha256, for `code.archive`."""
        archive = pack(working_dir)
        headers = {"Content-Type": "application/zip"}
        self._transport.send("PUT", f"/v1/code/{archive.sha256}", headers=headers, content=archive.data)
        return archive.sha256

    def _with_archive(self, document: Any, base: Path) -> Any:
        code = document.get("code") if isinstance(document, dict) else None
        if not isinstance(code, dict) or not isinstance(code.get("working_dir"), str) or code.get("archive"):
            return document
        working_dir = base / Path(code["working_dir"]).expanduser()
        return document | {"code": {**code, "working_dir": None, "archive": self.upload_code(working_dir)}}

    def _ask(self, job_id: str, verb: str) -> JobView:
        return JobView.model_validate_json(self._transport.send("POST", f"{_path(job_id)}/{verb}").content)

    def _get(self, path: str, model: type[M], params: Mapping[str, Any] | None = None, wait_s: float = 0.0) -> M:
        response = self._transport.send("GET", path, params=params, wait_s=wait_s)
        return model.model_validate_json(response.content)


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _node_path(node_id: str) -> str:
    return f"/v1/nodes/{quote(node_id, safe='')}"


def _document_of(spec: JobSpec | Mapping[str, Any] | str | Path) -> tuple[Any, Path]:
    """The spec as plain values, and the directory that its relative paths start from."""
    if isinstance(spec, JobSpec):
        return spec.model_dump(mode="json", exclude_unset=True), Path()
    if isinstance(spec, Mapping):
        return dict(spec), Path()
    path = Path(spec)
    return decode(path.read_text(encoding="utf-8"), SpecFormat.of(path.name))[0], path.parent


def _is_reached(job: JobView, until: Callable[[JobView], bool] | Collection[JobState] | None) -> bool:
    if until is None:
        return False
    return until(job) if callable(until) else job.status.state in until
