"""The verbs about the queue, about sweeps, about projects and about users."""

from __future__ import annotations

from urllib.parse import quote

from shoal_api.client.endpoint import JSON_CONTENT, Endpoint
from shoal_service.fleet_views import ProjectRules, ProjectView, QueueView, SweepSummary, SweepView, UserRules, UserView
from shoal_service.views import Page


class Scheduling(Endpoint):
    """A part of `Client`."""

    def queue(self, *, limit: int = 1000) -> QueueView:
        """The queue in the order in which its jobs would start, and what each project uses."""
        return self._get("/v1/queue", QueueView, {"limit": limit})

    def sweeps(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[SweepSummary]:
        """Newest first; `project` and `name` None: of all."""
        params = {"project": project, "name": name, "limit": limit, "cursor": cursor}
        return self._get("/v1/sweeps", Page[SweepSummary], params)

    def sweep(self, project: str, name: str) -> SweepView:
        """Its rules, and its jobs, the best first."""
        return self._get(_sweep_path(project, name), SweepView)

    def cancel_sweep(self, project: str, name: str) -> SweepView:
        """Cancel those of its jobs that have not ended; they are the jobs of the answer."""
        response = self._transport.send("POST", f"{_sweep_path(project, name)}/cancel")
        return SweepView.model_validate_json(response.content)

    def projects(self) -> tuple[ProjectView, ...]:
        return self._get("/v1/projects", Page[ProjectView]).items

    def project(self, name: str) -> ProjectView:
        return self._get(_path(name), ProjectView)

    def set_project(self, name: str, rules: ProjectRules) -> ProjectView:
        """Define a project, or replace all of its quotas."""
        body = rules.model_dump_json().encode()
        response = self._transport.send("PUT", _path(name), headers=JSON_CONTENT, content=body)
        return ProjectView.model_validate_json(response.content)

    def delete_project(self, name: str) -> None:
        """Delete the quotas of a project; its jobs go on under those of the project `default`."""
        self._transport.send("DELETE", _path(name), idempotent=False)

    def users(self) -> tuple[UserView, ...]:
        return self._get("/v1/users", Page[UserView]).items

    def user(self, name: str) -> UserView:
        return self._get(_user_path(name), UserView)

    def set_user(self, name: str, rules: UserRules) -> UserView:
        """Replace the limits of a user. The limits of the user `default` apply to users without limits of their own."""
        body = rules.model_dump_json().encode()
        response = self._transport.send("PUT", _user_path(name), headers=JSON_CONTENT, content=body)
        return UserView.model_validate_json(response.content)

    def delete_user(self, name: str) -> None:
        """Delete the limits of a user; those of `default` then apply."""
        self._transport.send("DELETE", _user_path(name), idempotent=False)


def _sweep_path(project: str, name: str) -> str:
    return f"/v1/sweeps/{quote(project, safe='')}/{quote(name, safe='')}"


def _user_path(name: str) -> str:
    return f"/v1/users/{quote(name, safe='')}"


def _path(name: str) -> str:
    return f"/v1/projects/{quote(name, safe='')}"
