"""AccessMethods: the methods of `Store` about tokens, sessions and the audit. See `Store` for what they share."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select

from shoal_service.access_views import AuditEvent, NewToken, TokenRequest, TokenView
from shoal_service.core.access import Principal, hash_of, new_token
from shoal_service.store.access import audit, sessions, tokens
from shoal_service.store.database import Database
from shoal_service.store.errors import JobNotFound
from shoal_service.store.tables import deletions, jobs


class AccessMethods:
    """A part of `Store`."""

    _database: Database

    def create_token(self, request: TokenRequest, *, by: str, now: float, token: str | None = None) -> NewToken:
        """`token`: one that exists already, in a file; if its id is known, nothing changes. None: a new one. Only this
        answer has it."""
        made = token or new_token()
        make = tokens.create if token is None else tokens.adopt
        with self._database.write() as tx:
            view = make(tx, made, request, by=by, now=now)
        return NewToken(token=made, **dict(view))

    def principal_of_token(self, token: str, *, now: float) -> Principal | None:
        """None: no valid token is this one."""
        with self._database.read() as tx:
            return tokens.find(tx, hash_of(token), now=now)

    def list_tokens(self) -> list[TokenView]:
        """Newest first, with those that have ended."""
        with self._database.read() as tx:
            return tokens.listed(tx)

    def get_token(self, token_id: str) -> TokenView:
        """Raises TokenNotFound."""
        with self._database.read() as tx:
            return tokens.view(tx, token_id)

    def revoke_token(self, token_id: str, *, now: float) -> TokenView:
        """Idempotent. Raises TokenNotFound."""
        with self._database.write() as tx:
            return tokens.revoke(tx, token_id, now=now)

    def note_use_of_tokens(self, used: Mapping[str, float]) -> None:
        """When tokens were used last, by id."""
        with self._database.write() as tx:
            tokens.note_use(tx, used)

    def begin_session(
        self, secret: str, principal: Principal, *, now: float, ends_at: float, is_link: bool = False
    ) -> None:
        """`secret`: what the cookie holds, or the code of a link. Deletes the sessions that have ended."""
        with self._database.write() as tx:
            sessions.begin(tx, secret, principal, now=now, ends_at=ends_at, is_link=is_link)

    def principal_of_session(self, secret: str, *, now: float) -> Principal | None:
        """None: there is no such session any more, or its token is not valid."""
        with self._database.read() as tx:
            return sessions.find(tx, secret, now=now)

    def take_link(self, code: str, *, now: float) -> Principal | None:
        """Who made the link, which cannot be used again; None: it is not valid."""
        with self._database.write() as tx:
            return sessions.take_link(tx, code, now=now)

    def end_session(self, secret: str) -> None:
        """Idempotent."""
        with self._database.write() as tx:
            sessions.end(tx, secret)

    def note_refusal(self, deed: audit.Deed, outcome: str) -> None:
        """A request that changed no row, or was refused: its code."""
        deed.is_recorded = True
        with self._database.write() as tx:
            audit.record(tx, deed, outcome)

    def old_audit_events(self, *, before: float) -> int:
        """How many are older."""
        with self._database.read() as tx:
            return audit.count_before(tx, before)

    def remove_audit_events(self, *, before: float, reason: str, now: float) -> int:
        """A batch of those that are older; how many, 0: there are no more. Each batch leaves a record."""
        with self._database.write() as tx:
            return audit.remove_before(tx, before, reason=reason, now=now)

    def audit_events(self, query: audit.AuditQuery) -> list[AuditEvent]:
        """Newest first."""
        with self._database.read() as tx:
            return audit.read(tx, query)

    def project_of(self, job_id: str) -> str:
        """Also of a job that is deleted, while its deletion is listed. Raises JobNotFound."""
        with self._database.read() as tx:
            project = tx.execute(select(jobs.c.project).where(jobs.c.id == job_id)).scalar_one_or_none()
            if project is None:
                gone = select(deletions.c.project).where(deletions.c.job_id == job_id)
                project = tx.execute(gone).scalar_one_or_none()
        if project is None:
            raise JobNotFound(job_id)
        return str(project)
