"""The verbs about what jobs leave: files, media, lineage of checkpoints, the registry of models. A part of `Client`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO
from urllib.parse import quote

from shoal_api.client.errors import Disconnected, NotFound
from shoal_api.client.transport import Endpoint, api_path, job_path
from shoal_service.artifact_views import (
    AliasRequest,
    LineageView,
    MediaPage,
    ModelRequest,
    ModelVersion,
    OutputPage,
)
from shoal_service.views import Page
from shoal_workers.contract.data_preview import DataPreview

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
