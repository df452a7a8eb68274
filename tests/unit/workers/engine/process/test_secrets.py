from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from shoal_workers.contract.messages import LogStream, Phase, Progress
from shoal_workers.contract.user_code import SecretSource
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.secrets import MAX_SECRET_BYTES, Mask, SecretUnreadable, read_secrets
from shoal_workers.engine.process.tee import Tee

NOW = Progress(generation=0, phase=Phase.PREPARING, step=0, at=0.0)


def test_a_secret_is_a_file_of_the_node_or_a_variable_of_it(tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("from a file\n")
    sources = {"A": SecretSource(file=str(tmp_path / "hub")), "B": SecretSource(env="HUB")}
    assert read_secrets(sources, {"HUB": "from a variable"}) == {"A": "from a file", "B": "from a variable"}


def test_what_is_no_secret_is_refused_in_words_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 10)
    (tmp_path / "large").write_text("x" * (MAX_SECRET_BYTES + 1))
    (tmp_path / "nul").write_text("a\0b")
    os.mkfifo(tmp_path / "fifo")
    wrong = {
        "missing": "cannot be read on this node: No such file",
        "binary": "is not UTF-8",
        "large": "more than 65536 bytes",
        "nul": "NUL character",
        "fifo": "not a regular file",
        ".": "not a regular file|Is a directory",
    }
    for name, words in wrong.items():
        with pytest.raises(SecretUnreadable, match=words) as refused:
            read_secrets({"HUB": SecretSource(file=str(tmp_path / name))}, {})
        assert str(refused.value).startswith("secrets.HUB: ")
        assert "xx" not in str(refused.value)
    with pytest.raises(SecretUnreadable, match="has no variable HUB"):
        read_secrets({"A": SecretSource(env="HUB")}, {})


def test_secrets_are_masked_in_what_a_worker_prints() -> None:
    mask, outbox, stream = Mask(), Outbox(), io.StringIO()
    tee = Tee(stream, LogStream.STDOUT, outbox, mask)
    mask.add({"TOKEN": "abcdef", "LONGER": "abcdef-and-more", "KEY": "first line\nsecond line", "SHORT": "on"})
    tee.write("token=abcdef; abcdef-and-more; on\nthe second line\n")
    shown = "token=[secret TOKEN]; [secret LONGER]; on\nthe [secret KEY]\n"
    assert stream.getvalue() == shown
    assert [line.text for line in outbox.poll(0, 0.0, NOW).logs] == shown.splitlines()
    tee.write("abc")
    tee.write("def\n")  # two writes: the log has whole lines
    assert outbox.poll(0, 0.0, NOW).logs[-1].text == "[secret TOKEN]"
