"""What a worker's process writes to its standard output and error, copied line by line to the outbox for `shoal logs`.

    print, sys.stdout.write    Tee              at once; to the outbox, and to the stream that Ray gave the process
    os.write(1, ...), C code,  file -> reader   within READ_S; the same. Descriptors 1 and 2 are replaced by files,
    children, .buffer                           because a file never blocks its writer, as a full pipe would

Installed by the worker's actor. It must never raise because of what user code prints, and it holds at most one
shortened line of each stream, however much is printed without an end of line. If the process crashes, what was not read
yet remains in the file.
"""

from __future__ import annotations

import codecs
import ctypes
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from shoal_workers.contract.messages import LogLine, LogStream
from shoal_workers.engine.process.outbox import Outbox

MAX_LINE_CHARS = 4000
"""The rest of a longer line is left out of the job's log."""
READ_S = 0.5
_MAX_SHOWN_BYTES = 256 << 10
"""The most that one look adds to the job's log. The rest is left out there, and passed on all the same."""
_MAX_BYTES = 64 << 20
"""The most that waits to be passed on, if Ray's stream is slower than the writers. The rest is lost."""
_CHUNK_BYTES = 1 << 20
_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, see fallocate(2)."""


class LineLog:
    """Text of one stream, cut into lines for the outbox. Any thread may add."""

    def __init__(self, name: LogStream, outbox: Outbox, mask: Callable[[str], str]) -> None:
        self._name = name
        self._outbox = outbox
        self._mask = mask
        self._partial = ""
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """Lines are shown as a terminal shows them: text after a carriage return replaces what is before it, so of a
        progress bar the last state remains."""
        with self._lock:
            *lines, last = text.split("\n")
            if lines:
                lines[0] = self._partial + lines[0]
                self._partial = ""
            self._partial = _visible(self._partial + last)
        for line in lines:
            self._log(line)

    def end_line(self) -> None:
        """Ends the last line, if it has no end yet."""
        with self._lock:
            line, self._partial = self._partial, ""
        self._log(line)

    def note(self, text: str) -> None:
        self._outbox.log(LogLine(at=time.time(), stream=LogStream.SHOAL, text=text))

    def _log(self, line: str) -> None:
        shown = _visible(line).removesuffix("\r")
        if shown:
            self._outbox.log(LogLine(at=time.time(), stream=self._name, text=self._mask(shown)))


class Tee:
    """Replaces `sys.stdout` or `sys.stderr`. Any thread may write."""

    def __init__(
        self,
        stream: TextIO,
        name: LogStream,
        outbox: Outbox,
        mask: Callable[[str], str] = lambda text: text,
        *,
        descriptor: int = -1,
    ) -> None:
        """`mask` replaces what must not be seen. In the stream itself, each written text is masked by itself.

        Args:
            descriptor: what this stream is for code that does not use Python's streams; -1: that of `stream`.
        """
        self._stream = stream
        self._mask = mask
        self._lines: LineLog | None = LineLog(name, outbox, mask)
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """Writes to the stream and to the outbox. Returns the number of characters."""
        if self._lines is not None:
            self._lines.add(text)
        masked = self._mask(text)
        try:
            self._stream.write(masked)
        except UnicodeEncodeError:  # Python's own stdout raises here, and its stderr does this
            self._stream.write(masked.encode(self._stream.encoding or "utf-8", "backslashreplace").decode())
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def end_line(self) -> None:
        if self._lines is not None:
            self._lines.end_line()

    def pass_on(self) -> None:
        """Called in a forked child, whose outbox is not read: from now on it writes to the descriptor."""
        self._stream, self._lines = _text(self._descriptor), None

    @property
    def buffer(self) -> Any:
        return io.FileIO(self._descriptor, "w", closefd=False) if self._descriptor >= 0 else self._stream.buffer

    def fileno(self) -> int:
        return self._descriptor if self._descriptor >= 0 else self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class CapturedOutput:
    """Both streams of this process, below and above Python. One per process; `folder` holds its two files."""

    def __init__(self, outbox: Outbox, mask: Callable[[str], str], folder: Path | None = None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._tees, self._files = [], []
        for descriptor, stream in ((1, LogStream.STDOUT), (2, LogStream.STDERR)):
            kept = os.dup(descriptor)
            path = folder / f"{os.getpid()}.{stream}" if folder is not None else None
            self._files.append(_RawOutput(descriptor, kept, LineLog(stream, outbox, mask), path))
            self._tees.append(Tee(_text(kept), stream, outbox, mask, descriptor=descriptor))
        sys.stdout, sys.stderr = self._tees
        os.register_at_fork(after_in_child=self._pass_on)
        threading.Thread(target=self._read, name="shoal-output", daemon=True).start()

    def flush(self) -> None:
        """Called from any thread: puts everything that was written before the call into the outbox, also a last line
        without an end."""
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
        for file in self._files:
            file.read(end_line=True)
        for tee in self._tees:
            tee.end_line()

    def _pass_on(self) -> None:
        for tee in self._tees:
            tee.pass_on()

    def _read(self) -> None:
        while True:
            time.sleep(READ_S)
            for file in self._files:
                file.read()


class _RawOutput:
    """A file in the place of a descriptor, and what becomes of its content."""

    def __init__(self, descriptor: int, kept: int, lines: LineLog, path: Path | None) -> None:
        """`kept`: a duplicate of what the descriptor was."""
        self._kept = kept
        self._lines = lines
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600) if path is not None else _nameless(flags)
        os.dup2(self._file, descriptor)

    def read(self, *, end_line: bool = False) -> None:
        """Pass on what is new. Any thread."""
        with self._lock:
            begin, end = self._at, os.fstat(self._file).st_size
            shown_from = max(begin, end - _MAX_SHOWN_BYTES)
            if end - begin > _MAX_BYTES:
                self._at = end - _MAX_BYTES
            if shown_from > begin:
                self._decoder.reset()
                self._lines.end_line()
                self._lines.note(f"{shown_from - begin} bytes of output were left out here: they came too fast.")
            while self._at < end:
                stop = shown_from if self._at < shown_from else end
                chunk = os.pread(self._file, min(_CHUNK_BYTES, stop - self._at), self._at)
                if self._at >= shown_from:
                    self._lines.add(self._decoder.decode(chunk))
                self._at += len(chunk)
                _write_all(self._kept, chunk)
            if end_line:
                self._lines.add(self._decoder.decode(b"", final=True))
                self._decoder.reset()
                self._lines.end_line()
            if end > begin:
                ctypes.CDLL(None).fallocate(
                    self._file, _PUNCH_HOLE, ctypes.c_long(begin), ctypes.c_long(end - begin)
                )  # else it would take memory or disk; where that is not supported, it does


def _text(descriptor: int) -> TextIO:
    """Writes without a buffer, so that nothing is lost in a crash or written twice after a fork."""
    raw: Any = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _nameless(flags: int) -> int:
    number, name = tempfile.mkstemp(prefix="shoal-output-")
    os.close(number)
    number = os.open(name, flags)
    Path(name).unlink()
    return number


def _write_all(descriptor: int, data: bytes) -> None:
    """What cannot be written is lost: the job's log has it."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        pass


def _visible(line: str) -> str:
    """The text after the last carriage return, at most MAX_LINE_CHARS of it. One at the end is kept: it may belong to
    the end of the line, or the next text replaces this one."""
    end = "\r" if line.endswith("\r") else ""
    text = line.rstrip("\r")
    return text[text.rfind("\r") + 1 :][:MAX_LINE_CHARS] + end
