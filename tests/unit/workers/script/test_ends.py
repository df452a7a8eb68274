"""The ends of a script, the numbers that libraries log, new files, and the copy of another job's files."""

import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from shoal.names import sorted_out
from shoal_workers.contract.exception_causes import ErrorClass
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import is_metric_name
from shoal_workers.script.ends import Ended, end_of, killed
from shoal_workers.script.takeover import MARK, NothingToContinue, take_over
from shoal_workers.script.written_files import WrittenFiles

_LIBRARIES = sysconfig.get_paths()["purelib"]
_DIST = ["torch.distributed.DistBackendError", "torch.distributed.DistError", "builtins.RuntimeError"]
_RUNTIME = ["builtins.RuntimeError", "builtins.Exception"]


def raised(
    message: str, bases: list[str], *, cause: dict[str, Any] | None = None, raising_file: str = ""
) -> dict[str, Any]:
    link = {
        "type": bases[0].removeprefix("builtins."),
        "message": message,
        "errno": None,
        "bases": bases,
        "raising_file": raising_file,
    }
    frames = [["/code/train.py", 41, "step"], [f"{_LIBRARIES}/torch/x.py", 3, "all_reduce"]]
    return {"traceback": "Traceback ...", "frames": frames, "chain": [link, *([cause["chain"][0]] if cause else [])]}


@pytest.mark.parametrize(
    ("message", "bases"),
    [
        ("NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error", _DIST),
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:19", _RUNTIME),
        ("wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1", ["torch.distributed.DistStoreError", *_DIST]),
    ],
)
def test_a_broken_collective_is_known_by_type_and_text(message: str, bases: list[str]) -> None:
    kind, error = end_of(Ended(code=1, raised=raised(message, bases)), "train.py", "/code")
    assert kind is ExitKind.COLLECTIVE_FAILED
    assert error is not None and error.line == "train.py:41 in step()"


def test_the_cause_of_an_exception_counts_too() -> None:
    cause = raised("Connection closed by peer", _RUNTIME)
    end = Ended(code=1, raised=raised("epoch 3 failed", ["builtins.ValueError"], cause=cause))
    assert end_of(end, "train.py", "/code")[0] is ExitKind.COLLECTIVE_FAILED


def test_a_broken_connection_of_the_scripts_own_is_its_own_error() -> None:
    bases = ["builtins.ConnectionResetError", "builtins.OSError", "builtins.Exception"]
    kind, error = end_of(Ended(code=1, raised=raised("Connection reset by peer", bases)), "train.py", "/code")
    assert kind is ExitKind.USER_ERROR and error is not None and error.error_class is ErrorClass.PLAIN


@pytest.mark.parametrize(
    ("raising_file", "kind"),
    [
        ("/code/train.py", ExitKind.USER_ERROR),
        (f"{_LIBRARIES}/requests/adapters.py", ExitKind.USER_ERROR),
        (f"{_LIBRARIES}/torch/distributed/distributed_c10d.py", ExitKind.COLLECTIVE_FAILED),
    ],
)
def test_the_place_where_it_was_raised_decides_and_not_its_text(raising_file: str, kind: ExitKind) -> None:
    error = raised("could not fetch shard 7: Connection closed by peer", _RUNTIME, raising_file=raising_file)
    assert end_of(Ended(code=1, raised=error), "train.py", "/code")[0] is kind


def test_tensors_of_unequal_sizes_are_the_scripts_own_mistake_with_its_line() -> None:
    printed = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /pytorch/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 16 vs 12
Fatal Python error: Aborted

Thread 0x00007f2b (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Thread 0x00007f2c (most recent call first):
  File "/code/train.py", line 12 in step
  File "/code/train.py", line 20 in <module>
"""
    kind, error = end_of(Ended(signal=signal.SIGABRT, printed=printed), "train.py", "/code")
    assert kind is ExitKind.USER_ERROR and error is not None
    assert error.sentence == (
        "a collective of train.py at train.py:12 in step() has received 16 bytes and expects 12: the ranks have called "
        "it with tensors of different sizes, or have called different collectives."
    )


def test_an_exception_counts_although_the_process_was_killed_afterwards() -> None:
    end = Ended(signal=signal.SIGKILL, raised=raised("no metric", ["builtins.ValueError", "builtins.Exception"]))
    assert end_of(end, "train.py", "/code")[0] is ExitKind.USER_ERROR


def test_a_lack_of_device_memory_is_a_fault_that_other_ranks_may_not_have() -> None:
    message = "CUDA out of memory. Tried to allocate 22.00 MiB."
    kind, error = end_of(Ended(code=1, raised=raised(message, ["torch.OutOfMemoryError", *_RUNTIME])), "t.py", "/")
    assert kind is ExitKind.WORKER_FAULT and error is not None and error.error_class is ErrorClass.DEVICE_MEMORY


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE])
def test_a_signal_that_a_process_causes_itself_is_a_crash(number: signal.Signals) -> None:
    kind, error = end_of(Ended(signal=number), "-m package.train", "/code")
    assert kind is ExitKind.USER_ERROR and error is not None and error.mistake == "crash"
    assert f"({number.name})" in error.sentence and error.sentence.startswith("-m package.train crashed")


@pytest.mark.parametrize(
    "printed",
    [
        "[rank1]:[E ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3",
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 Rank 1] Process",
        "terminate called after throwing an instance of 'gloo::IoException'",
    ],
)
def test_an_abort_for_a_broken_collective_is_no_crash(printed: str) -> None:
    kind, error = end_of(Ended(signal=signal.SIGABRT, printed=printed), "train.py", "/code")
    assert kind is ExitKind.COLLECTIVE_FAILED and error is not None
    assert error.sentence == "a collective of train.py was broken, and its process was killed by signal 6 (SIGABRT)."


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_from_outside_is_nobodys_mistake(number: signal.Signals) -> None:
    assert end_of(Ended(signal=number), "train.py", "/code") == (ExitKind.SCRIPT_DIED, None)
    for has_killed in (False, True):
        report = killed(Ended(signal=number), "train.py", out_of_memory=has_killed)
        is_oom = has_killed and number is signal.SIGKILL
        words = "the kernel: out of memory" if is_oom else f"signal {number.value} ({number.name})"
        assert report.sentence == f"the process of train.py was killed by {words}"
        assert report.type == ("OutOfMemory" if is_oom else f"Signal{number.value}")


@pytest.mark.parametrize(
    ("logged", "known", "others"),
    [
        (
            {"loss": 1.0, "grad_norm": 2.0, "learning_rate": 3.0, "epoch": 4.0},
            {"loss": 1.0, "grad_norm": 2.0, "lr": 3.0},
            {"epoch": 4.0},
        ),
        ({"eval_loss": 1.0, "eval_runtime": 2.0, "eval_samples_per_second": 3.0}, {}, {"eval_loss": 1.0}),
        ({"train/train_loss": 1.0, "train/train_runtime": 2.0, "train/total_flos": 3.0}, {}, {}),
        ({"Loss/train": 1.0, "Loss/test": 2.0}, {"loss": 1.0}, {"Loss/test": 2.0}),
        ({"val/loss": 1.0, "train/loss": 2.0}, {"loss": 2.0}, {"val/loss": 1.0}),
        ({"kl_loss": 1.0, "train_loss": 2.0}, {"loss": 2.0}, {"kl_loss": 1.0}),
        ({"d_loss": 1.0, "g_loss": 2.0}, {"loss": 1.0}, {"g_loss": 2.0}),
        ({"lr-AdamW": 1.0, "lr-SGD": 2.0}, {"lr": 1.0}, {"lr-SGD": 2.0}),
        ({"train_loss_step": 1.0, "train_loss_epoch": 2.0}, {"loss": 1.0}, {"train_loss_epoch": 2.0}),
        ({"top 5": 1.0, "5": 2.0, "a" * 60: 3.0}, {}, {"top_5": 1.0, "a" * 40: 3.0}),
    ],
)
def test_names_of_libraries_are_known(logged: dict[str, Any], known: dict[str, Any], others: dict[str, Any]) -> None:
    assert sorted_out(logged) == (known, others)
    assert all(map(is_metric_name, others))


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "job-a"
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "last.pt").write_bytes(b"weights")
    (folder / "runs" / "one" / "log").write_text("line")
    (folder / "newest").symlink_to("last.pt")
    (folder / "profiles").mkdir()
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "job-b"
    folder.mkdir()
    return folder


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_files_are_copied_but_those_of_shoal(origin: Path, own: Path) -> None:
    words: list[str] = []
    take_over(origin, own, job="job-a", progress=words.append)
    copied = _content(own)
    assert copied.pop(MARK) == b"job-a\n"
    assert copied == {"last.pt": b"weights", "newest": b"weights", "runs/one/log": b"line"}
    assert (own / "newest").is_symlink() and not (own / "profiles").exists()
    assert words[-1] == "copied 0 MiB of what job-a has left"


def test_what_the_script_has_changed_since_is_not_copied_again(origin: Path, own: Path) -> None:
    take_over(origin, own, job="job-a", progress=lambda _: None)
    (own / "last.pt").write_bytes(b"newer")
    take_over(origin, own, job="job-a", progress=lambda _: None)
    assert (own / "last.pt").read_bytes() == b"newer"
    assert (origin / "last.pt").read_bytes() == b"weights"


def test_a_copy_that_was_interrupted_is_made_again(origin: Path, own: Path) -> None:
    class Killed(Exception):
        pass

    def kill(_: str) -> None:
        raise Killed

    with pytest.raises(Killed):
        take_over(origin, own, job="job-a", progress=kill)
    assert not (own / MARK).exists()
    (own / "runs").mkdir()
    (own / "runs" / "half").touch()  # as if it had ended between two of the renames
    take_over(origin, own, job="job-a", progress=lambda _: None)
    assert _content(own).keys() == {MARK, "last.pt", "newest", "runs/one/log"}


def test_a_job_that_has_left_nothing_cannot_be_continued(tmp_path: Path, own: Path) -> None:
    with pytest.raises(NothingToContinue, match=r"job-a: the job has left no file in .* without continue_from"):
        take_over(tmp_path / "never", own, job="job-a", progress=lambda _: None)


def test_what_the_other_job_has_logged_stays_there_and_a_folder_of_the_script_of_that_name_does_not(
    origin: Path, own: Path
) -> None:
    name = "step-000000000002-a1-g1-r0-n1"
    (origin / "media").mkdir()
    for ending in (".json", "-i0.png"):
        (origin / "media" / f"{name}{ending}").write_text("of Shoal")
    take_over(origin, own, job="job-a", progress=lambda _: None)
    assert not (own / "media").exists()

    (origin / "media" / "clip.wav").write_bytes(b"sound")
    (own / MARK).unlink()
    take_over(origin, own, job="job-a", progress=lambda _: None)
    assert _content(own / "media") == {"clip.wav": b"sound"}


def test_only_a_new_content_counts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "a.pt").write_bytes(b"one")
    (folder / "job-files").mkdir()
    files = WrittenFiles((str(folder), str(tmp_path / "missing"), "s3://bucket/job"), {"job-files"})

    def is_new(name: str, content: bytes) -> bool:
        files.begin()
        (folder / name).write_bytes(content)
        return files.has_new()

    seen = {
        "same content, later": is_new("a.pt", b"one"),
        "same content, another name": is_new("b.pt", b"one"),
        "a file of Shoal's": is_new("job-files/index.json", b"12:00"),
        "a log": is_new("train.log", b"12:00 step 1"),
        "an event file": is_new("events.out.tfevents.17.host.1", b"12:00"),
        "another content": is_new("a.pt", b"two"),
        "a new file": is_new("c.pt", b"three"),
        "a large file that differs everywhere": is_new("d.pt", os.urandom(5 << 20)),
    }
    assert [name for name, new in seen.items() if new] == [
        "another content",
        "a new file",
        "a large file that differs everywhere",
    ]
    files.begin()
    (folder / "c.pt").unlink()
    os.mkfifo(folder / "pipe")
    assert not files.has_new()
