"""The verbs that let a job go on in place."""

from __future__ import annotations

from shoal_api.client.endpoint import JSON_CONTENT, Endpoint, job_path
from shoal_service.views import ExtendRequest, JobView


class Lifecycle(Endpoint):
    """A part of `Client`."""

    def extend(self, job_id: str, steps: int) -> JobView:
        """Let a job go on to `steps` steps in all; an ended one returns to the queue."""
        body = ExtendRequest(steps=steps).model_dump_json().encode()
        path = f"{job_path(job_id)}/extend"
        response = self._transport.send("POST", path, headers=JSON_CONTENT, content=body, idempotent=False)
        return JobView.model_validate_json(response.content)

    def retry(self, job_id: str) -> JobView:
        """Let a failed job try again, from its newest checkpoint."""
        response = self._transport.send("POST", f"{job_path(job_id)}/retry", idempotent=False)
        return JobView.model_validate_json(response.content)
