"""Runs a command on a host of its own whose name server receives every query and answers none.

The host is a new network and mount namespace: loopback only, an /etc/hosts with `localhost` only, and an
/etc/resolv.conf that points to a socket of this program. Each query is written to a file, one name per line, so a test
asserts that there was none instead of measuring how long the waiting took. Needs the right to make namespaces.

    unshare --net --mount python silent_resolver.py QUERIES_FILE COMMAND...
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_NAME_SERVER = "127.0.0.53"
_HEADER_BYTES = 12
HERE = Path(__file__)


def command_prefix(queries: Path) -> list[str]:
    """What stands before a command that is to run there; its queries will be lines of the file."""
    return ["unshare", "--net", "--mount", sys.executable, str(HERE), str(queries)]


def is_permitted() -> bool:
    """Whether this user may make such a host."""
    try:
        made = subprocess.run(["unshare", "--net", "--mount", "ip", "link", "set", "lo", "up"], capture_output=True)
    except FileNotFoundError:
        return False
    return made.returncode == 0


def main() -> None:
    queries, command = Path(sys.argv[1]), sys.argv[2:]
    for step in (["mount", "--make-rprivate", "/"], ["ip", "link", "set", "lo", "up"]):
        subprocess.run(step, check=True)
    with tempfile.TemporaryDirectory() as folder:
        _cover(Path("/etc/resolv.conf"), f"nameserver {_NAME_SERVER}\noptions timeout:1 attempts:1\n", Path(folder))
        _cover(Path("/etc/hosts"), "127.0.0.1 localhost\n::1 localhost\n", Path(folder))
    resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    resolver.bind((_NAME_SERVER, 53))
    command_pid = os.getpid()
    if os.fork() == 0:
        _record(resolver, queries, command_pid)
    resolver.close()
    os.execvp(command[0], command)


def _cover(path: Path, text: str, folder: Path) -> None:
    """This namespace sees `text` in place of the file; the file itself is not changed."""
    replacement = folder / path.name
    replacement.write_text(text)
    subprocess.run(["mount", "--bind", replacement, path], check=True)


def _record(resolver: socket.socket, queries: Path, command_pid: int) -> None:
    """Until the command has ended."""
    os.setsid()
    resolver.settimeout(0.5)
    for descriptor in (0, 1):  # the command's own pipes must close with it
        os.close(descriptor)
    with queries.open("a", buffering=1) as file:
        while os.getppid() == command_pid:
            try:
                query = resolver.recv(512)
            except TimeoutError:
                continue
            file.write(_name_of(query) + "\n")
    os._exit(0)


def _name_of(query: bytes) -> str:
    labels, at = [], _HEADER_BYTES
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode(errors="replace"))
        at += 1 + query[at]
    return ".".join(labels)


if __name__ == "__main__":
    main()
