"""Started by Ray instead of Python: requests the process from the node's fork server, or starts Python itself.

    python -I -S launch.py [--if-warm] SCRIPT ARGUMENTS...

Ray runs this for a process whose runtime environment names it as `py_executable`. It lives as long as the process that
it requested, which registers with Ray under its own pid. If anything fails before that process exists, Python is
started nearly as Ray would have started it; with --if-warm also while the server still imports, because that takes
longer than what a supervisor imports. It imports little of the standard library, because it runs once per process.
"""

import errno
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  (pathlib takes longer to import)
LISTENER_FD = 3
IF_WARM = "--if-warm"
_LONGEST_ADDRESS = 100
_BACKLOG = 256
LARGEST_REQUEST = 192 << 10
_RAYLET_SOCKET = "--raylet-name="
_CREDENTIALS = "3i"
"""pid, uid and gid; see unix(7)."""
PRELOAD = "SHOAL_PRELOAD"
"""Names a module that the server imports besides its own; see `preload`."""
FORK_SERVER = "SHOAL_FORK_SERVER"
"""In a forked process: the address of the server that has forked it."""
READ_WHEN_LOADED = (
    PRELOAD,
    "ATEN_",
    "DNNL_",
    "GOMP_",
    "KMP_",
    "LC_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NPY_",
    "NUMPY_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "OMP_PROC",
    "OMP_PLACES",
    "OMP_WAIT",
    "OMP_DYNAMIC",
    "PYTHONHASHSEED",
    "PYTHONOPTIMIZE",
    "PYTHONWARNINGS",
    "PYTHONMALLOC",
    "PYTHONDEVMODE",
    "PYTHONUTF8",
    "GLIBC_",
    "LANG",
    "TZ",
    "CUDA_HOME",
    "CUDA_MODULE_LOADING",
    "RAY_",
)
"""Variables with these prefixes are read when Python or a library is loaded, so a fork could not have its own values.

The variables of Ray differ between drivers, not between workers; RAY_JOB_ID is one of them.
"""


def main() -> None:
    argv = sys.argv[1:]
    if_warm = argv[:1] == [IF_WARM]
    if if_warm:
        argv = argv[1:]
    try:
        pid = fork_elsewhere(argv, if_warm=if_warm)
    except OSError:
        pid = 0
    if not pid:
        os.execv(sys.executable, [sys.executable, os.path.join(HERE, "idle.py"), *argv])  # noqa: PTH118
    wait_for(pid)


def fork_elsewhere(argv: list[str], *, if_warm: bool = False) -> int:
    """Return the pid of a process that runs `argv` with the streams, environment and directory of this one; 0: it
    failed, or `if_warm` is set and the server still imports."""
    address = address_of(argv)
    if not address:
        return 0
    with connect(address) as connection:
        if if_warm and not os.path.exists(warm_marker(address)):  # noqa: PTH110
            return 0
        return fork_over(connection, argv, (0, 1, 2))


def fork_from(server: str, argv: list[str], streams: tuple[int, int, int]) -> int:
    """Return the pid of a process that the running server at this address has forked for `argv`, with the environment
    and directory of this process. Never starts a server.

    Raises:
        OSError: there is no server, or it forks no process.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(server)
        pid = fork_over(connection, argv, streams) if is_of_this_user(connection) else 0
    if not pid:
        raise ChildProcessError(f"the fork server at {server} forks no process")
    return pid


def fork_over(connection: socket.socket, argv: list[str], streams: tuple[int, int, int]) -> int:
    """Ask the server at the other end of this connection; 0: it has ended, or the request is too large."""
    request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()  # noqa: PTH109
    if len(request) > LARGEST_REQUEST:
        return 0
    socket.send_fds(connection, [request], streams)
    return int(connection.recv(32) or b"0")  # empty: the server ended before it could answer


def address_of(argv: list[str]) -> str:
    """Return the socket of the server for this node, this code and these library settings; empty: the raylet is not
    known."""
    raylet = next((argument[len(_RAYLET_SOCKET) :] for argument in argv if argument.startswith(_RAYLET_SOCKET)), "")
    settings = sorted(item for item in os.environ.items() if item[0].startswith(READ_WHEN_LOADED))
    kind = hashlib.sha256(repr((sys.executable, code_version(), settings)).encode()).hexdigest()[:8]
    address = f"{raylet}.shoal-{kind}"
    return address if raylet and len(address) <= _LONGEST_ADDRESS else ""


def warm_marker(address: str) -> str:
    """A file that exists once the server at that address has imported everything."""
    return f"{address}.warm"


def code_version(package: str = os.path.dirname(HERE)) -> tuple[int, int]:  # noqa: PTH120
    """Changes when a file of the package changes, so that a server with older imports is not used."""
    newest, count = 0, 0
    for folder, folders, files in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime_ns)  # noqa: PTH116, PTH118
            count += 1
    return newest, count


def connect(address: str) -> socket.socket:
    """A connection to the server at that address. Starts the server if there is none; it may still be importing."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lock = os.open(f"{address}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # if many are launched at the same time, one of them starts the server
        try:
            connection.connect(address)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                raise
            start_server(address)
            connection.connect(address)
        if not is_of_this_user(connection):  # it would get this process's environment
            raise PermissionError(f"the server at {address} is of another user")
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(lock)
    return connection


def is_of_this_user(connection: socket.socket) -> bool:
    """The process at the other end, when it connected or listened, had this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS))
    return bool(struct.unpack(_CREDENTIALS, credentials)[1] == os.getuid())


def start_server(address: str) -> None:
    """Start the server with a socket that already listens, so clients wait until it has imported everything."""
    for left in (address, warm_marker(address)):  # by a server that died
        with suppress(FileNotFoundError):
            os.unlink(left)  # noqa: PTH108
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)  # noqa: PTH101
        listener.listen(_BACKLOG)
        log = os.open(f"{address}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        os.posix_spawn(
            sys.executable,
            [sys.executable, os.path.join(HERE, "server.py"), address, str(os.getppid())],  # noqa: PTH118
            # the same code as this file's, also if another version of the package is installed
            environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.path.dirname(os.path.dirname(HERE))},  # noqa: PTH120
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
                (os.POSIX_SPAWN_DUP2, listener.fileno(), LISTENER_FD),
            ],
            setpgroup=0,
        )
        os.close(log)


def wait_for(pid: int) -> None:
    """Wait until that process has ended. SIGTERM to this process is passed on to it."""
    with suppress(ProcessLookupError):
        signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
        process = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll()


if __name__ == "__main__":
    main()
