"""WebhookMethods: the methods of `Store` about webhooks. See `Store` for what they share."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal_service.core.events.service import WebhookGaveUp
from shoal_service.core.webhooks import ServiceWebhook
from shoal_service.store import driving
from shoal_service.store import lease as leases
from shoal_service.store.database import Database
from shoal_service.store.hub import Hub
from shoal_service.store.webhooks import cursors, reads
from shoal_service.store.webhooks.cursors import Failure, Lane
from shoal_service.views import WebhookView


class WebhookMethods:
    """A part of `Store`."""

    _database: Database
    _hub: Hub

    # --- REST

    def webhooks(
        self, job_id: str | None = None, *, limit: int = 100, visible: Collection[str] | None = None
    ) -> list[WebhookView]:
        """The hooks that concern a job; None: those of the settings, over all jobs, and at most `limit` hooks of specs
        that fail. `visible`: without a job only hooks of specs of these projects. Raises JobNotFound."""
        with self._database.read() as tx:
            return reads.of_all(tx, limit=limit, visible=visible) if job_id is None else reads.of_job(tx, job_id)

    # --- delivery

    def register_webhooks(self, hooks: Sequence[ServiceWebhook], *, epoch: int, now: float) -> None:
        """These are all hooks of the settings. A new one gets the events from now on; what is known of others is
        deleted."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            cursors.register(tx, hooks, now=now)

    def webhook_backlog(self, changed_since: float) -> list[Lane]:
        """The lanes with events after their cursors, of jobs that have changed since then."""
        with self._database.read() as tx:
            return cursors.backlog(tx, changed_since)

    def settle_webhook(self, lane: Lane, seq: int, *, delivered: int, epoch: int, now: float) -> None:
        """Events up to number `seq` need no further attempt; `delivered` of them were accepted by the receiver."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            cursors.settle(tx, lane, seq, delivered=delivered, now=now)

    def fail_webhook(
        self, lane: Lane, failure: Failure, gave_up: WebhookGaveUp | None, *, epoch: int, now: float
    ) -> None:
        """An attempt has failed. `gave_up`: the event that the job gets if attempts end with it."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            cursors.fail(tx, lane, failure)
            if gave_up is not None:
                driving.record_event(tx, lane.job_id, gave_up, now=now)
        if gave_up is not None:
            self._hub.publish(lane.job_id)
