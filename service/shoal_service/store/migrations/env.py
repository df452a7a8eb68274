"""Alembic's entry point: it runs this file as a script, on the connection (and in the transaction) of `migrate`."""

from __future__ import annotations

from alembic import context

from shoal_service.store.database import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
