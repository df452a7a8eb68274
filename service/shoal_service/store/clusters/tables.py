"""The tables of clusters and of the orders to their gateways."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, PrimaryKeyConstraint, String, Table, Text

from shoal_service.store.tables import metadata

clusters = Table(
    "clusters",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("life", String(16), nullable=False),  # of the gateway that speaks for it; empty: none does
    Column("token_id", String(16), nullable=False),  # that this gateway has shown
    Column("report", BigInteger, nullable=False),  # number of its newest report
    Column("reported_at", Double, nullable=False),
    Column("address", Text, nullable=False),
    Column("error", Text, nullable=False),  # why Ray does not answer; empty: it does
    Column("snapshot", Text, nullable=False),  # JSON: ClusterSnapshot; empty: there is none of this life
    Column("snapshot_report", BigInteger, nullable=False),  # number of the report that it came with
    Column("last_order", BigInteger, nullable=False),  # number of the newest order
    Column("ray_cluster", String(64), nullable=False, server_default=""),  # id of the Ray cluster; empty: not known
    Column("labels", Text, nullable=False, server_default="{}"),  # JSON: str -> str, added to those of its nodes
    Column("cordon", Text, nullable=False, server_default=""),  # JSON: Cordon; empty: there is none
)

cluster_orders = Table(
    "cluster_orders",
    metadata,
    Column("cluster", String(63), ForeignKey("clusters.name", ondelete="CASCADE"), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("kind", String(63), nullable=False),
    Column("arguments", Text, nullable=False),  # JSON
    Column("archive", String(64), nullable=True),  # SHA-256 of the code archive that the gateway may read for it
    Column("created_at", Double, nullable=False),
    Column("answer", Text, nullable=True),  # JSON: Answer; null: there is none yet
    Column("answered_at", Double, nullable=True),
    PrimaryKeyConstraint("cluster", "number"),
    sqlite_with_rowid=False,
)
