"""One line per log event, with its fields, in both formats."""

import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from kit.sources import PRODUCT, relative, sources
from shoal_workers.contract.log_settings import LogFormat, LogLevel, LogSettings
from shoal_workers.logs import EventFormatter, set_up_logs

CONTEXT: dict[str, object] = {"job": "j1", "attempt": 2, "generation": 3, "rank": None}
NAME = "shoal_test_logs"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger(NAME)
    yield logger
    logger.handlers.clear()
    logger.propagate = True


def set_up(log_format: LogFormat, level: LogLevel = LogLevel.INFO) -> None:
    set_up_logs(LogSettings(level=level, format=log_format), loggers=[NAME], context=lambda: CONTEXT)


def record(message: str, *args: object, name: str = NAME, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.WARNING, "file.py", 1, message, args, None)
    made.__dict__.update(created=1700000000.25, **extra)
    return made


def test_text_has_the_event_then_the_fields_of_the_process_then_those_of_the_event() -> None:
    line = EventFormatter(LogFormat.TEXT, lambda: CONTEXT).format(record("node.gone", node_id="n1", error='say "no"'))
    expected = 'WARNING node.gone job=j1 attempt=2 generation=3 node_id=n1 error="say \\"no\\""'
    assert line == "2023-11-14 22:13:20.250 " + expected


def test_json_is_one_object_per_line_with_typed_fields() -> None:
    line = EventFormatter(LogFormat.JSON, lambda: CONTEXT).format(record("node.gone", nodes=["n1"], rank=0))
    assert json.loads(line) == {
        "at": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "event": "node.gone",
        "job": "j1",
        "attempt": 2,
        "generation": 3,
        "rank": 0,
        "nodes": ["n1"],
        "logger": NAME,
    }


@pytest.mark.parametrize("log_format", LogFormat)
def test_text_from_outside_cannot_forge_a_second_line(log_format: LogFormat) -> None:
    formatter = EventFormatter(log_format)
    assert "\n" not in formatter.format(record("node.gone", error="a\nb"))
    assert "\n" not in formatter.format(record("a library says %s", "a\nb"))


def test_a_traceback_is_a_field_of_json_and_indented_in_text(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for log_format in LogFormat:
        set_up(log_format)
        try:
            raise ValueError("boom")
        except ValueError:
            logger.exception("driver.failed")
    text, json_line = capsys.readouterr().err.split("ValueError: boom\n", 1)
    first, *rest = text.splitlines()
    assert first.endswith("ERROR driver.failed job=j1 attempt=2 generation=3")
    assert rest and all(line.startswith("    ") for line in rest)
    assert "ValueError: boom" in json.loads(json_line)["traceback"]


def test_a_request_of_uvicorn_is_an_event_with_fields() -> None:
    access = record('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", "/v1/jobs?x", "1.1", 200, name="uvicorn.access")
    line = EventFormatter(LogFormat.TEXT).format(access)
    assert line.endswith('http.request client=127.0.0.1:5 method=GET path="/v1/jobs?x" http_version=1.1 status=200')


def test_the_level_is_obeyed_and_a_second_set_up_replaces_the_first(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(LogFormat.TEXT)
    set_up(LogFormat.TEXT, LogLevel.WARNING)
    logger.info("worker.kill")
    logger.warning("lease.lost")
    assert capsys.readouterr().err.count("\n") == 1


def test_events_follow_a_replaced_stderr(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker replaces sys.stderr, so that users see its events among the job's log lines."""
    set_up(LogFormat.TEXT)
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    logger.warning("lease.lost")
    captured = capsys.readouterr()
    assert captured.err == "" and "lease.lost" in captured.out


def test_every_event_of_shoal_has_a_fixed_name_and_its_data_in_fields() -> None:
    call = re.compile(r"\b(?:_log|log|logger)\.(?:debug|info|warning|error|exception|critical)\(")
    arguments = re.compile(r"\s*\"([a-z_]+\.[a-z_]+)\"\s*(?:,?\s*\)|,\s*\w+=)")
    wrong, names = [], set()
    for path, text in sources(*PRODUCT).items():
        for start in call.finditer(text):
            name = arguments.match(text, start.end())
            if name is None:
                wrong.append(f"{relative(path)}:{text.count(chr(10), 0, start.start()) + 1}")
            else:
                names.add(name[1])
    assert wrong == [] and len(names) > 20
