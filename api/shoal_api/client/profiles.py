"""The verbs about profiles of running jobs: request one, read its table, write its files."""

from __future__ import annotations

from typing import BinaryIO

import httpx

from shoal_api.client.endpoint import JSON_CONTENT, Endpoint, job_path
from shoal_api.client.errors import Disconnected
from shoal_service.views import Page, ProfileBody, ProfileView


class Profiles(Endpoint):
    """A part of `Client`."""

    def request_profile(self, job_id: str, *, steps: int = 3, rank: int = 0) -> ProfileView:
        """Profile `steps` steps of a rank of a running job, without stopping it. Returns at once: the profile has ended
        when the state of `profile` is not `requested` any more."""
        body = ProfileBody(steps=steps, rank=rank).model_dump_json().encode()
        path = f"{job_path(job_id)}/profiles"
        response = self._transport.send("POST", path, headers=JSON_CONTENT, content=body, idempotent=False)
        return ProfileView.model_validate_json(response.content)

    def profiles(self, job_id: str) -> tuple[ProfileView, ...]:
        """The newest 8, oldest first."""
        return self._get(f"{job_path(job_id)}/profiles", Page[ProfileView]).items

    def profile(self, job_id: str, number: int) -> ProfileView:
        return self._get(f"{job_path(job_id)}/profiles/{number}", ProfileView)

    def save_profile_file(self, job_id: str, number: int, name: str, out: BinaryIO) -> None:
        """Write one of the `files` of a profile, as it is.

        Raises:
            Disconnected: the answer broke off; `out` has a part of it.
        """
        path = f"{job_path(job_id)}/profiles/{number}/files/{name}"
        try:
            with self._transport.stream(path, {}, {}) as response:
                for piece in response.iter_raw():
                    out.write(piece)
        except httpx.TransportError as error:
            raise Disconnected(self._transport.base_url, str(error) or type(error).__name__) from error
