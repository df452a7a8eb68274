"""A Python interpreter that starts in 20 ms: the zygote forks a process for the command, and this one waits for it.

    python [-u] [-P] [-m MODULE | -c CODE | SCRIPT] ARGUMENTS...

`Zygote` writes this file as an executable with a `#!` line, and its socket has the name of that executable. The forked
process has the descriptors, environment and directory of this one, but another pid and session. If this process is
killed, the zygote kills the session. Signals that ask a program to end are passed on. With other options, or with
variables that libraries read when they are loaded, the real interpreter runs instead. It imports little, because it
starts once for each process.
"""

import marshal
import os
import signal
import sys
from _socket import AF_UNIX, MSG_NOSIGNAL, SCM_RIGHTS, SOCK_SEQPACKET, SOL_SOCKET, socket

OPTIONS = ("-u", "-P")
COLD = b"cold"
"""The zygote's answer if its forks cannot do what the real interpreter would do."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main():
    arguments = sys.argv[1:]
    descriptors = open_descriptors()
    zygote = socket(AF_UNIX, SOCK_SEQPACKET)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until they can be passed on
    zygote.connect(f"{os.path.abspath(sys.argv[0])}.socket")  # noqa: PTH100  (pathlib takes longer to import)
    answer = COLD if is_cold(arguments) else request(zygote, arguments, descriptors)
    if answer == COLD:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(sys.executable, [sys.executable, *arguments])
    pid = int(answer)
    for number in PASSED_ON:
        signal.signal(number, lambda received, _: pass_on(received, pid))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for descriptor in descriptors:  # the other end must see that the forked process closes its own
        os.close(descriptor)
    end_as(int(zygote.recv(32) or 1))


def is_cold(arguments):
    """Other options than OPTIONS stand before the program, or there is no program."""
    programs = [argument for argument in arguments if argument not in OPTIONS]
    return not programs or (programs[0].startswith("-") and programs[0] not in ("-m", "-c"))


def open_descriptors():
    """All that this process has inherited."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    return [number for number in numbers if is_open(number)]


def is_open(number):
    """False for the descriptor by which the directory was read."""
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


def request(zygote, arguments, descriptors):
    """The pid of the forked process, or COLD."""
    message = marshal.dumps((arguments, dict(os.environb), os.getcwd(), descriptors, False))  # noqa: PTH109
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    zygote.sendmsg([message], [(SOL_SOCKET, SCM_RIGHTS, numbers)], MSG_NOSIGNAL)
    return zygote.recv(32)


def pass_on(number, pid):
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # its status is on its way
        pass


def end_as(status):
    """Ends this process as the other has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


main()
