"""The verbs about what jobs leave: files, media, lineage of checkpoints, the registry of models. A part of `Client`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO
from urllib.parse import quote

import httpx

from shoal_api.client.errors import Disconnected, NotFound
from shoal_api.client.transport import JSON_CONTENT, Endpoint, job_path
from shoal_service.artifact_views import (
    AliasRequest,
    LineageView,
    MediaPage,
    ModelRequest,
    ModelVersion,
    OutputPage,
)
from shoal_service.views import Page

_NOT_MODIFIED = 304


class Artifacts(Endpoint):
    """They raise what those of `Client` raise."""

    def media(self, job_id: str, *, step: int | None = None, limit: int = 50, spread: bool = False) -> MediaPage:
        """Return what a job has logged besides numbers: the records of a step, else the newest ones, or, with `spread`,
        those of evenly spaced steps of the whole run."""
        params = {"limit": limit, **({} if step is None else {"step": step}), **({"spread": True} if spread else {})}
        return self._get(f"{job_path(job_id)}/media", MediaPage, params)

    def media_file(self, job_id: str, file: str) -> bytes:
        """Return the bytes of an image that a record of `media` names, as they were encoded."""
        return self._transport.send("GET", f"{job_path(job_id)}/media/{quote(file, safe='')}").content

    def files(self, job_id: str, match: str = "**", *, limit: int = 1000) -> OutputPage:
        """Return what the program of a job has written below its directory, of files that match the pattern."""
        return self._get(f"{job_path(job_id)}/files", OutputPage, {"match": match, "limit": limit})

    def save_file(self, job_id: str, name: str, out: BinaryIO) -> None:
        """Write a file of `files`, as it is.

        Raises:
            Disconnected: the answer broke off; `out` has a part of it.
        """
        try:
            with self._transport.stream(f"{job_path(job_id)}/files/{quote(name)}", {}, {}) as response:
                for piece in response.iter_raw():
                    out.write(piece)
        except httpx.TransportError as error:
            raise Disconnected(self._transport.base_url, str(error) or type(error).__name__) from error

    def lineage(self, job_id: str) -> LineageView:
        """Return what the checkpoints of a job come from."""
        return self._get(f"{job_path(job_id)}/lineage", LineageView)

    def models(self, *, project: str | None = None, name: str | None = None) -> tuple[ModelVersion, ...]:
        """Return the registered versions of models, the newest version of each first."""
        wanted = {"project": project, "name": name}
        params = {key: value for key, value in wanted.items() if value is not None}
        return self._get("/v1/models", Page[ModelVersion], params).items

    def model(self, project: str, name: str, which: str = "latest") -> ModelVersion:
        """Return a version of a model, by number or alias."""
        return self._get(f"{_model_path(project, name)}/{quote(which, safe='')}", ModelVersion)

    def follow_model(
        self, project: str, name: str, which: str = "latest", *, every_s: float = 10.0
    ) -> Iterator[ModelVersion]:
        """Yield the version that an alias names, then each other one that it names later; for servers of models.

        It asks every `every_s` seconds with the ETag of the last answer. It goes on while the service cannot be
        reached, or the alias names nothing after it has named something; `close` ends it.
        """
        path, tag, shown = f"{_model_path(project, name)}/{quote(which, safe='')}", "", None
        while True:
            try:
                response = self._transport.send("GET", path, headers={"If-None-Match": tag} if tag else None)
            except (Disconnected, NotFound):
                if shown is None:
                    raise
            else:
                if response.status_code != _NOT_MODIFIED:
                    tag, found = response.headers["ETag"], ModelVersion.model_validate_json(response.content)
                    if found.version != shown:
                        shown = found.version
                        yield found
            if not self._transport.pause(every_s):
                return

    def register_model(self, name: str, request: ModelRequest) -> ModelVersion:
        """Register a checkpoint as the next version of a model."""
        path = f"/v1/models/{quote(name, safe='')}/versions"
        response = self._transport.send("POST", path, content=request.model_dump_json().encode(), headers=JSON_CONTENT)
        return ModelVersion.model_validate_json(response.content)

    def set_model_alias(self, project: str, name: str, alias: str, version: int) -> ModelVersion:
        """Let an alias name this version from now on."""
        path = f"{_model_path(project, name)}/aliases/{quote(alias, safe='')}"
        content = AliasRequest(version=version).model_dump_json().encode()
        response = self._transport.send("PUT", path, content=content, headers=JSON_CONTENT)
        return ModelVersion.model_validate_json(response.content)

    def remove_model_alias(self, project: str, name: str, alias: str) -> None:
        """Delete an alias; the version stays."""
        self._transport.send("DELETE", f"{_model_path(project, name)}/aliases/{quote(alias, safe='')}")

    def remove_model(self, project: str, name: str, version: int) -> None:
        """Take a version out of the registry; its checkpoint stays."""
        self._transport.send("DELETE", f"{_model_path(project, name)}/versions/{version}")


def _model_path(project: str, name: str) -> str:
    return f"/v1/models/{quote(project, safe='')}/{quote(name, safe='')}"
