"""Who listens on a port of this machine, as Linux tells in /proc/net/tcp. Called by `credentials`.

It opens no connection. On other systems, and if no process listens, the answer is None.
"""

from __future__ import annotations

from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTEN = "0A"


def owner_of_port(port: int, tables: tuple[Path, ...] = _TABLES) -> int | None:
    """The user id of the process that listens on a TCP port of loopback or of all addresses; None: not known.

    If several listen there, one that is not root is named.
    """
    found: set[int] = set()
    for table in tables:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 7 and fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(int(fields[7]))
    return max(found, default=None)
