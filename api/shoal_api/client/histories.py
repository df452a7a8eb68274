"""The verbs that read what a job did: events, logs, series, workers, stacks, incidents, checkpoints, profiles and
parity. Also those about what jobs leave: files, media, lineage of checkpoints, the registry of models. Parts of
`Client`.

JSON has null for a number that is not finite; here it becomes NaN or infinity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import BinaryIO
from urllib.parse import quote

from shoal_api.answers import EventPage, LogPage
from shoal_api.client.errors import Disconnected, NotFound
from shoal_api.client.transport import Endpoint, api_path, follow_stream, job_path
from shoal_service.artifact_views import (
    AliasRequest,
    LineageView,
    MediaPage,
    ModelRequest,
    ModelVersion,
    OutputPage,
)
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.parity import DEFAULT_TOLERANCE
from shoal_service.core.system_metrics import SystemMetric
from shoal_service.views import (
    CheckpointView,
    EventView,
    IncidentView,
    JobOverview,
    LogView,
    Page,
    ParityView,
    ProfileBody,
    ProfileView,
    SpecVersion,
    SystemColumns,
    VerificationView,
    WorkerView,
)
from shoal_workers.contract import Stacks
from shoal_workers.contract.data_preview import DataPreview

_STACKS_S = 35.0
_DELETE_S = 125.0
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

    def overview(self, job_id: str) -> JobOverview:
        """Return everything that a page about the job shows, with at most 500 points of its series."""
        return self._get(job_path(job_id, "overview"), JobOverview)

    def spec_versions(self, job_id: str) -> tuple[SpecVersion, ...]:
        """Return the versions of the job's spec, oldest first."""
        return self._get(job_path(job_id, "specs"), Page[SpecVersion]).items

    def workers(self, job_id: str) -> tuple[WorkerView, ...]:
        return self._get(job_path(job_id, "workers"), Page[WorkerView]).items

    def stacks(self, job_id: str, *, rank: int | None = None, native: bool = False) -> Stacks:
        """Return what the training threads of all workers do now, or that of one rank. `native` adds frames of native
        code."""
        params = {"rank": rank, "native": native}
        return self._get(job_path(job_id, "stacks"), Stacks, params, wait_s=_STACKS_S)

    def system(
        self, job_id: str, metric: SystemMetric = SystemMetric.BUSY, *, ranks: str = "", after: float = 0.0
    ) -> SystemColumns:
        """Return a system metric of each rank over time. `ranks`: only these, for example `0,4-7`; empty: all ranks.
        `after`: only what was measured after this time, in shorter intervals."""
        params = {"metric": metric.value, "ranks": ranks, "after": after}
        return self._get(job_path(job_id, "system"), SystemColumns, params)

    def incidents(self, job_id: str) -> tuple[IncidentView, ...]:
        return self._get(job_path(job_id, "incidents"), Page[IncidentView]).items

    def checkpoints(self, job_id: str) -> tuple[CheckpointView, ...]:
        return self._get(job_path(job_id, "checkpoints"), Page[CheckpointView]).items

    def pin_checkpoint(self, job_id: str, name: str) -> CheckpointView:
        """Retention does not delete the checkpoint of this name (`CheckpointView.name`) from now on."""
        return self._call("PUT", job_path(job_id, "checkpoints", name, "pin"), CheckpointView)

    def unpin_checkpoint(self, job_id: str, name: str) -> CheckpointView:
        """Retention may delete the checkpoint of this name again."""
        return self._call("DELETE", job_path(job_id, "checkpoints", name, "pin"), CheckpointView)

    def verify_checkpoint(self, job_id: str, name: str, *, wait_s: float = 30.0) -> VerificationView:
        """Read every byte of the checkpoint of this name and compare it with its marker. Begins or joins the
        verification, and waits up to `wait_s` seconds (60 at most): repeat the call while its state is `running`."""
        wait_s, path = min(wait_s, 60.0), job_path(job_id, "checkpoints", name, "verify")
        return self._call("POST", path, VerificationView, params={"wait": wait_s}, wait_s=wait_s)

    def delete_checkpoint(self, job_id: str, name: str) -> CheckpointView:
        """Delete the checkpoint of this name from the storage; it cannot be undone."""
        return self._call("DELETE", job_path(job_id, "checkpoints", name), CheckpointView, wait_s=_DELETE_S)

    def parity(
        self, job_id: str, against: str, *, tolerance: float = DEFAULT_TOLERANCE, max_points: int = 0
    ) -> ParityView:
        """Compare the losses of two jobs. `max_points`: number of steps to list, those that differ most first."""
        params = {"against": against, "tolerance": tolerance, "max_points": max_points}
        response = self._transport.send("GET", job_path(job_id, "parity"), params=params)
        return parse_parity(response.content)

    def request_profile(self, job_id: str, *, steps: int = 3, rank: int = 0) -> ProfileView:
        """Profile `steps` steps of a rank of a running job, without stopping it. Returns at once: the profile has ended
        when the state of `profile` is not `requested` any more."""
        return self._call(
            "POST",
            job_path(job_id, "profiles"),
            ProfileView,
            body=ProfileBody(steps=steps, rank=rank),
            idempotent=False,
        )

    def profiles(self, job_id: str) -> tuple[ProfileView, ...]:
        """Return the newest 8 profiles, oldest first."""
        return self._get(job_path(job_id, "profiles"), Page[ProfileView]).items

    def profile(self, job_id: str, number: int) -> ProfileView:
        return self._get(job_path(job_id, "profiles", str(number)), ProfileView)

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

    def media(self, job_id: str, *, step: int | None = None, limit: int = 50, spread: bool = False) -> MediaPage:
        """Return what a job has logged besides numbers: the records of a step, else the newest ones, or, with `spread`,
        those of evenly spaced steps of the whole run."""
        return self._get(job_path(job_id, "media"), MediaPage, {"limit": limit, "step": step, "spread": spread or None})

    def media_file(self, job_id: str, file: str) -> bytes:
        """Return the bytes of an image that a record of `media` names, as they were encoded."""
        return self._transport.send("GET", job_path(job_id, "media", file)).content

    def data(self, job_id: str) -> DataPreview:
        """Return what a job reads: samples with the tokens in the loss, lengths, labels, and what is left out."""
        return self._get(job_path(job_id, "data"), DataPreview)

    def files(self, job_id: str, match: str = "**", *, limit: int = 1000) -> OutputPage:
        """Return what the program of a job has written below its directory, of files that match the pattern."""
        return self._get(job_path(job_id, "files"), OutputPage, {"match": match, "limit": limit})

    def save_file(self, job_id: str, name: str, out: BinaryIO) -> None:
        """Write a file of `files`, as it is.

        Raises:
            Disconnected: the answer broke off; `out` has a part of it.
        """
        self._save(f"{job_path(job_id)}/files/{quote(name)}", out, raw=True)

    def lineage(self, job_id: str) -> LineageView:
        """Return what the checkpoints of a job come from."""
        return self._get(job_path(job_id, "lineage"), LineageView)

    def models(self, *, project: str | None = None, name: str | None = None) -> tuple[ModelVersion, ...]:
        """Return the registered versions of models, the newest version of each first."""
        return self._get("/v1/models", Page[ModelVersion], {"project": project, "name": name}).items

    def model(self, project: str, name: str, which: str = "latest") -> ModelVersion:
        """Return a version of a model, by number or alias."""
        return self._get(api_path("models", project, name, which), ModelVersion)

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

    def register_model(self, name: str, request: ModelRequest) -> ModelVersion:
        """Register a checkpoint as the next version of a model."""
        return self._call("POST", api_path("models", name, "versions"), ModelVersion, body=request)

    def set_model_alias(self, project: str, name: str, alias: str, version: int) -> ModelVersion:
        """Let an alias name this version from now on."""
        return self._call(
            "PUT", api_path("models", project, name, "aliases", alias), ModelVersion, body=AliasRequest(version=version)
        )

    def remove_model_alias(self, project: str, name: str, alias: str) -> None:
        """Delete an alias; the version stays."""
        self._transport.send("DELETE", api_path("models", project, name, "aliases", alias))

    def remove_model(self, project: str, name: str, version: int) -> None:
        """Take a version out of the registry; its checkpoint stays."""
        self._transport.send("DELETE", api_path("models", project, name, "versions", str(version)))
