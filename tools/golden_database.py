"""Keeps the rows of a server's database as a document, so that later releases show that they open it.

    python tools/golden_database.py STATE_DIRECTORY

writes tests/golden/database-SCHEMA.json from the SQLite database of a server that has been stopped: run it at each
release, on a server with jobs in several states. tests/store/upgrades/test_releases.py loads every such document into
an empty database of its schema and opens it with the present release. Long tables are cut; paths of this machine are
replaced.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, LargeBinary, MetaData, Table, create_engine, delete, insert, inspect, select

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden"
_MOST_ROWS = 40
"""Rows of a table in a document; events and incidents of a job are kept whole."""
_WHOLE = {"events", "incidents", "jobs", "job_specs", "checkpoints"}
_SCHEMA = "alembic_version"


def dump(connection: Connection, state_directory: str) -> dict[str, Any]:
    """Dumps a database as `{"schema": ..., "tables": {name: rows}}`."""
    tables: dict[str, list[dict[str, Any]]] = {}
    schema = ""
    for name in inspect(connection).get_table_names():
        rows = [dict(row) for row in connection.execute(select(_table(connection, name))).mappings()]
        if name == _SCHEMA:
            [schema] = [row["version_num"] for row in rows]
        elif rows:
            tables[name] = [_encoded(row) for row in (rows if name in _WHOLE else rows[:_MOST_ROWS])]
    text = json.dumps(tables).replace(state_directory.rstrip("/"), "/var/lib/shoal")
    return {"schema": schema, "tables": json.loads(text)}


def load(connection: Connection, document: dict[str, Any]) -> None:
    """Loads rows into tables of the document's schema, instead of the rows that the migrations have made."""
    tables = [_table(connection, name) for name in document["tables"]]
    metadata = MetaData()
    for table in tables:
        table.to_metadata(metadata)
    for table in reversed(metadata.sorted_tables):
        connection.execute(delete(table))
    for table in metadata.sorted_tables:
        if rows := document["tables"].get(table.name):
            binary = {column.name for column in table.columns if isinstance(column.type, LargeBinary)}
            connection.execute(insert(table), [_decoded(row, binary) for row in rows])


def _table(connection: Connection, name: str) -> Table:
    return Table(name, MetaData(), autoload_with=connection)


def _encoded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: base64.b64encode(v).decode() if isinstance(v, bytes) else v for key, v in row.items()}


def _decoded(row: dict[str, Any], binary: set[str]) -> dict[str, Any]:
    return {key: base64.b64decode(value) if key in binary and value else value for key, value in row.items()}


def main(state_directory: str) -> None:
    engine = create_engine(f"sqlite:///{state_directory}/shoal.db")
    with engine.connect() as connection:
        document = dump(connection, state_directory)
    engine.dispose()
    path = FOLDER / f"database-{document['schema']}.json"
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
