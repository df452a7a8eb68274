"""Imports torch and the engine once, then forks a process for each request at its socket.

    python zygote.py SOCKET

A fork is ready after 15 ms, a new interpreter after two seconds. The zygote stays single-threaded, as forks require. It
ends when its standard input is closed, and ends what it has forked. `warm_python.py` and `Zygote` send the requests.
"""

import atexit
import builtins
import fcntl
import functools
import gc
import importlib
import importlib.machinery
import io
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path

from shoal_workers.forkserver.launch import LARGEST_REQUEST, READ_WHEN_LOADED
from shoal_workers.libc_tunables import VARIABLE as TUNABLES

MODULES = (
    "torch._dynamo",
    "torch.distributed.run",
    "shoal_workers.check",
    "shoal_workers.check_loop",
    "shoal_workers.engine.engine",
    "shoal_workers.snapshot_store.store",
    "shoal_workers.standalone",
    "shoal_workers.tasks.lm",
)
COLD = b"cold"
_READ_WHEN_LOADED = ("PYTHON", *READ_WHEN_LOADED)
_INSTALLED = ("PYTHONPATH", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_NCCL_ASYNC_ERROR_HANDLING", TUNABLES)
"""A forked process has its own path and asks for GPUs itself. NCCL reads its setting when it forms a group, and the
settings of malloc change no result."""
MOST_DESCRIPTORS = 64
HIGH_DESCRIPTOR = 1000
"""Higher than any that a request names."""


class Zygote:
    def __init__(self, listener):
        self.listener = listener
        self.poll = select.poll()
        self.poll.register(0, select.POLLIN)
        self.poll.register(listener, select.POLLIN)
        self.requests = {}  # descriptor -> connection whose request has not come
        self.children = {}  # pidfd -> (pid, connection or None)
        self.clients = {}  # descriptor of such a connection -> pidfd

    def serve(self):
        """Returns in each forked process, with its request. In the zygote it returns None at its end."""
        while True:
            for number, _ in self.poll.poll():
                if number == 0:
                    self.end_all()
                    return None
                if number == self.listener.fileno():
                    connection, _ = self.listener.accept()
                    self.poll.register(connection, select.POLLIN)
                    self.requests[connection.fileno()] = connection
                elif number in self.requests:
                    if (request := self.fork(self.requests.pop(number))) is not None:
                        return request
                elif number in self.children:
                    self.reap(number)
                elif number in self.clients:  # killed, as its process is to be
                    kill_session(self.children[self.clients[number]][0])
                    self.poll.unregister(number)

    def fork(self, connection):
        """The request in the forked process, else None."""
        self.poll.unregister(connection)
        message, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, MOST_DESCRIPTORS)
        request = Request(*marshal.loads(message), descriptors) if message else None
        if request is None or not request.is_warm():
            with suppress(OSError):
                connection.send(COLD)
            connection.close()
        else:
            num_threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
            assert num_threads == 1, f"the zygote has {num_threads} threads"
            pid = os.fork()
            if pid == 0:
                self.forget(connection)
                return request
            self.watch(pid, connection, request)
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def watch(self, pid, connection, request):
        pidfd = os.pidfd_open(pid)
        self.poll.register(pidfd, select.POLLIN)
        self.children[pidfd] = pid, None if request.is_detached else connection
        try:
            connection.send(str(pid).encode())
        except OSError as error:  # the client is dead, else `Zygote.start` shows this line
            print(f"no answer to the request for process {pid}: {error!r}", file=sys.stderr, flush=True)
        if request.is_detached:
            connection.close()
        else:
            self.poll.register(connection, select.POLLIN)
            self.clients[connection.fileno()] = pidfd

    def reap(self, pidfd):
        pid, connection = self.children.pop(pidfd)
        self.poll.unregister(pidfd)
        os.close(pidfd)
        status = os.waitpid(pid, 0)[1]
        if connection is not None:
            del self.clients[connection.fileno()]
            with suppress(KeyError):
                self.poll.unregister(connection)
            with suppress(OSError):
                connection.send(str(status).encode())
            connection.close()

    def forget(self, connection):
        """In a forked process: the descriptors are closed by `Request.install`."""
        connections = [client for _, client in self.children.values() if client is not None]
        for own in (self.listener, connection, *self.requests.values(), *connections):
            own.detach()

    def end_all(self):
        for pid, _ in self.children.values():
            kill_session(pid)


class Request:
    """What a new process runs, with the arguments, environment, directory and descriptors of a command."""

    def __init__(self, arguments, environment, directory, numbers, is_detached, descriptors):
        """`descriptors`: received ones, which have `numbers` in the new process."""
        self.arguments, self.directory, self.is_detached = arguments, directory, is_detached
        self.environment = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
        self.numbers, self.descriptors = numbers, descriptors

    def is_warm(self):
        """No variable differs from the zygote's that was read when the libraries were loaded."""
        read = [name for name in self.environment if name.startswith(_READ_WHEN_LOADED) and name not in _INSTALLED]
        return all(self.environment[name] == os.environ.get(name) for name in read)

    def install(self):
        """Makes this process what a new interpreter would be."""
        os.setsid()
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH_DESCRIPTOR) for descriptor in self.descriptors]
        os.closerange(0, HIGH_DESCRIPTOR)
        for descriptor, number in zip(high, self.numbers, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # else the same in all forks

    def run(self, path):
        """Runs the program. `path`: entries of sys.path that do not come from the environment."""
        options, arguments = [], list(self.arguments)
        while arguments[0] in ("-u", "-P"):
            options.append(arguments.pop(0))
        if "-u" in options:
            sys.stdout.reconfigure(write_through=True)
        sys.orig_argv = [sys.executable, *self.arguments]
        sys.path = [*filter(None, self.environment.get("PYTHONPATH", "").split(os.pathsep)), *path]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__builtins__ = builtins
        program, *sys.argv[1:] = arguments[1:] if arguments[0] in ("-m", "-c") else arguments
        sys.argv[0] = arguments[0]
        if "-P" not in options:
            first = {"-m": self.directory, "-c": ""}.get(arguments[0], str(Path(program).resolve().parent))
            sys.path.insert(0, first)
        if arguments[0] == "-m":
            sys.modules.pop(program, None)  # a new interpreter has not imported it, and runpy warns if it is there
            runpy._run_module_as_main(program)
        elif arguments[0] == "-c":
            exec(compile(program, "<string>", "exec"), vars(main))
        else:
            file = main.__file__ = str(Path(self.directory, program))
            main.__cached__ = None
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
            with io.open_code(file) as source:
                code = compile(source.read(), file, "exec")
            exec(code, vars(main))


def kill_session(pid):
    """With SIGKILL, the process and what is in its process group."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end_of(run):
    """Calls `run` as the main program. Returns the exit status once all has ended that an interpreter waits for."""
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next.tb_next  # without `end_of` and `Request.run`
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()
    atexit._run_exitfuncs()
    return status & 0xFF


def main(address):
    given = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = [entry for entry in sys.path[1:] if entry not in given]
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # a process's own collection would visit everything that was imported, and copy its pages: 0.4 s
    gc.enable()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(256)
    print("ready", flush=True)
    request = Zygote(listener).serve()
    if request is not None:
        request.install()
        sys.executable = address.removesuffix(".socket")
        status = end_of(functools.partial(request.run, path))
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)


main(sys.argv[1])
