from __future__ import annotations

import io

import pytest

from shoal_workers.contract.messages import LogStream, Phase, Progress
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.tee import MAX_LINE_CHARS, Tee

NOW = Progress(generation=1, phase=Phase.FORWARD, step=3, at=0.0)


def logged(*pieces: str) -> list[str]:
    """The lines of the job's log after these writes."""
    outbox, stream = Outbox(), io.StringIO()
    tee = Tee(stream, LogStream.STDOUT, outbox)
    for piece in pieces:
        assert tee.write(piece) == len(piece)
    assert stream.getvalue() == "".join(pieces), "the stream gets everything"
    return [line.text for line in outbox.poll(0, 0.0, NOW).logs]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (("a\nb\n",), ["a", "b"]),
        (("a", "b\nc", "\n"), ["ab", "c"]),
        (("\n\n",), []),
        (("unix\nwindows\r\n",), ["unix", "windows"]),
        (("windows\r", "\n"), ["windows"]),
        (("\r10%", "\r20%", "\r100%\n"), ["100%"]),
        (("10%\r", "20%\r", "done\n"), ["done"]),
        (("half", "a line"), []),
        (("\x1b[2J\x1b[1;31mred\x1b[0m\n",), ["red"]),
        (("\x1b]0;a title\x07text\x1b(B\n",), ["text"]),
        (("a\tb\x08\x07\x9b1mc\u202ed\n",), ["a\tb\\x08\\x07c\\u202ed"]),
    ],
)
def test_lines_are_logged_as_a_terminal_shows_them(pieces: tuple[str, ...], lines: list[str]) -> None:
    assert logged(*pieces) == lines


def test_a_long_line_is_shortened() -> None:
    assert logged("x" * (2 * MAX_LINE_CHARS) + "\n", "next\n") == ["x" * MAX_LINE_CHARS, "next"]


@pytest.mark.parametrize("piece", ["\r 50%|#####     | 5000/10000 [00:10<00:10]", "no end of line " * 10])
def test_text_without_an_end_of_line_takes_no_memory(piece: str) -> None:
    tee = Tee(io.StringIO(), LogStream.STDERR, Outbox())
    for _ in range(10_000):
        tee.write(piece)
    assert tee._lines is not None and len(tee._lines._partial) <= MAX_LINE_CHARS + 1


def test_several_lines_at_once_are_logged_and_a_last_one_is_ended() -> None:
    outbox = Outbox()
    tee = Tee(io.StringIO(), LogStream.STDOUT, outbox)
    tee.writelines(["a\n", "b\n", "no end"])
    tee.end_line()
    tee.end_line()
    assert [line.text for line in outbox.poll(0, 0.0, NOW).logs] == ["a", "b", "no end"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_text_that_the_stream_cannot_encode_is_written_with_escapes(encoding: str) -> None:
    raw = io.BytesIO()
    outbox, stream = Outbox(), io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    Tee(stream, LogStream.STDERR, outbox).write("caf\udce9 is no file\n")
    assert raw.getvalue() == b"caf\\udce9 is no file\n"
    assert [line.text for line in outbox.poll(0, 0.0, NOW).logs] == ["caf\\udce9 is no file"]
