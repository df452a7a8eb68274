"""The directory of a job on a node, and what of it is collected into the job's storage and restored from there."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from kit.views import assignment
from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.outputs import FOLDER, OutputFile, OutputManifest, OutputsSpec, matcher, merged
from shoal_workers.job_files.directory import JobDirectory
from shoal_workers.job_files.keeper import OutputKeeper
from shoal_workers.job_files.outputs import Outputs, Writer, read_manifests

_ENTER = """
import json, sys
from pathlib import Path
from shoal_workers.job_files.directory import enter
enter(Path(sys.argv[1]), Path(sys.argv[2]))
import helper, package.module
print(json.dumps([str(Path.cwd()), helper.__file__, package.module.__file__]))
"""


class Node:
    """A directory of job-1 on a node of its own, and its outputs."""

    def __init__(self, directory: JobDirectory, storage: Path, number: int = 0, **spec: object) -> None:
        self.directory = directory
        directory.open(None, "", _ignore)
        self.path = self.directory.path
        self.number = number
        self.storage = open_job_directory(str(storage / "job-1")).child(FOLDER)
        self.outputs = Outputs(self.directory, str(storage / "job-1"), OutputsSpec.model_validate(spec))

    def write(self, name: str, text: str, *, at_s: float = -60.0) -> None:
        """`at_s`: time of the change, from now."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        at = time.time() + at_s
        os.utime(path, (at, at))

    def collect(self, generation: int = 1, *, is_last: bool = True) -> list[str] | None:
        """The names in the storage afterwards."""
        writer = Writer(self.number, 1, generation)
        collected = self.outputs.collect(writer, is_last=is_last, note=_ignore)
        return None if collected is None else [file.name for file in collected.manifest.files]

    def read(self) -> dict[str, str]:
        """Every file with its content."""
        return {str(p.relative_to(self.path)): p.read_text() for p in self.path.rglob("*") if p.is_file()}


def _ignore(_: str) -> None:
    pass


@pytest.fixture
def directory() -> Iterator[Callable[[Path, Path], JobDirectory]]:
    """`directory(base, root)`: that of the job with this storage, in `base`."""
    with ExitStack() as stack:
        yield lambda base, root: stack.enter_context(closing(JobDirectory(root.name, str(root), base)))


@pytest.fixture
def node(tmp_path: Path, directory: Callable[[Path, Path], JobDirectory]) -> Callable[..., Node]:
    def make(name: str = "a", number: int = 0, **spec: object) -> Node:
        storage = tmp_path / "storage"
        return Node(directory(tmp_path / name, storage / "job-1"), storage, number, **spec)

    (tmp_path / "storage" / "job-1").mkdir(parents=True)
    return make


def test_each_job_has_a_writable_copy_of_its_code_and_keeps_what_it_has_written(
    tmp_path: Path, directory: Callable[[Path, Path], JobDirectory]
) -> None:
    code = tmp_path / "package"
    (code / "sub").mkdir(parents=True)
    for name in ("train.py", "sub/data.txt", "old.py"):
        (code / name).write_text("1")
    (code / "train.py").chmod(0o555)
    (code / "secret").symlink_to("/etc/passwd")
    jobs = [directory(tmp_path / "jobs", Path(f"/storage/job-{n}")) for n in (1, 2)]
    for job in jobs:
        job.open(code, "first", _ignore)
    first, second = (job.path for job in jobs)
    for name in ("train.py", "sub/data.txt"):
        inodes = {(place / name).stat().st_ino for place in (code, first, second)}
        assert len(inodes) == 3 and not (first / name).is_symlink(), "neither hard nor symbolic links"
        (first / name).write_text("changed by the program")
        assert (code / name).read_text() == (second / name).read_text() == "1"
    assert os.access(first / "train.py", os.X_OK) and not (first / "secret").exists()
    (first / "last.pt").write_text("40 steps")

    again = directory(tmp_path / "jobs", Path("/storage/job-1"))
    again.open(code, "first", _ignore)
    assert again.path == first and (first / "sub/data.txt").read_text() == "changed by the program"

    (code / "old.py").unlink()
    (code / "train.py").unlink()
    (code / "train.py").write_text("2")
    (second / "sub/data.txt").unlink()
    (second / "sub").rmdir()
    (second / "sub").symlink_to(tmp_path)
    for job in jobs:
        job.open(code, "second", _ignore)
    assert (first / "train.py").read_text() == "2" and not (first / "old.py").exists()
    assert (first / "last.pt").read_text() == "40 steps"
    assert (second / "sub" / "data.txt").read_text() == "1" and not (tmp_path / "data.txt").exists()


def test_modules_are_imported_from_the_directory_of_the_job(
    tmp_path: Path, directory: Callable[[Path, Path], JobDirectory]
) -> None:
    code = tmp_path / "code"
    (code / "package").mkdir(parents=True)
    for name in ("helper.py", "package/__init__.py", "package/module.py"):
        (code / name).write_text("")
    job = directory(tmp_path / "jobs", Path("/storage/job-1"))
    job.open(code, "first", _ignore)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(code), *sys.path])}
    program = [sys.executable, "-c", _ENTER, str(job.path), str(code)]
    answer = subprocess.run(program, cwd=code, env=environment, capture_output=True, text=True, check=True)
    here = job.path
    assert answer.stdout.strip() == f'["{here}", "{here / "helper.py"}", "{here / "package/module.py"}"]'


def test_patterns_say_what_is_kept() -> None:
    cases = {
        "**": {"a.pt": True, "x/y/z": True},
        "*.pt": {"a.pt": True, "x/a.pt": True, "a.pt.new": False, "x.pt/a": False},
        "runs/**": {"runs/a": True, "runs/x/a": True, "runs": False, "x/runs/a": False},
        "runs/": {"runs/a": True, "x/runs/a": False},
        "out/*.json": {"out/a.json": True, "out/x/a.json": False},
        "**/best/*": {"best/a": True, "x/y/best/a": True, "best/x/a": False},
        "model-?.bin": {"model-1.bin": True, "model-10.bin": False},
        "a+(b).txt": {"a+(b).txt": True, "aab.txt": False},
    }
    wrong = [
        (pattern, name)
        for pattern, names in cases.items()
        for name, is_kept in names.items()
        if matcher([pattern])(name) is not is_kept
    ]
    assert wrong == []
    assert not matcher([])("a.pt")
    for pattern in ("", "/", "../x", "a/../b", "a\nb"):
        with pytest.raises(ValidationError):
            OutputsSpec(keep=(pattern,))


def test_only_what_the_program_has_written_is_collected_and_links_reach_nothing(
    node: Callable[..., Node], tmp_path: Path
) -> None:
    one = node(keep=["*.pt", "runs/**"])
    code = tmp_path / "code"
    code.mkdir()
    (code / "start.pt").write_text("weights that were sent")
    one.directory.open(code, "first", _ignore)
    secret = tmp_path / "secret.pt"
    secret.write_text("of another user")
    (one.path / "link.pt").symlink_to(secret)
    (one.path / "folder").symlink_to(tmp_path)
    os.mkfifo(one.path / "pipe.pt")
    for name in ("last.pt", "runs/x/events", "notes.txt", ".hidden/a.pt", "__pycache__/a.pt", "a\nb.pt"):
        one.write(name, name)
    one.write(f"{'n' * 240}.pt", "longer than a draft of it could be named where it is restored")
    deep = _deep(one.path / "runs", 1200)
    try:
        assert one.collect() == ["last.pt", "runs/x/events"]
    finally:
        subprocess.run(["rm", "-r", deep], check=True)  # it goes as deep
    contents = [path.read_text() for path in (tmp_path / "storage").rglob("*") if path.is_file()]
    assert not any("another user" in content for content in contents)

    one.write("start.pt", "trained further")
    (one.path / "runs/x/events").unlink()
    assert one.collect() == ["last.pt", "start.pt"]
    assert len(one.storage.child("0").files()) == 3, "what no manifest names is removed"


def _deep(folder: Path, num: int) -> Path:
    """Directories in each other, which cannot be made by path."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(num):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    return folder / "d"


def test_limits_keep_the_newest_files_and_say_how_many_are_left_out(node: Callable[..., Node]) -> None:
    one = node(max_gib=10 / 2**30)
    for number in range(4):
        one.write(f"{number}.pt", "x" * 4, at_s=-100.0 + number)
    collected = one.outputs.collect(Writer(0, 1, 1), is_last=True, note=_ignore)
    assert collected is not None
    assert [file.name for file in collected.manifest.files] == ["2.pt", "3.pt"]
    assert (collected.manifest.num_left_out, collected.manifest.bytes_left_out) == (2, 8)


def test_a_file_that_may_be_half_written_waits_and_an_older_generation_replaces_nothing(
    node: Callable[..., Node],
) -> None:
    one = node()
    one.write("old.pt", "1")
    one.write("new.pt", "1", at_s=0.0)
    one.write("logs/old.txt", "1", at_s=-100.0)
    one.write("logs/new.txt", "1", at_s=0.0)
    one.write("checkpoint-1/model", "1")
    one.write("checkpoint-2/model", "1", at_s=-2.0)
    one.write("checkpoint-2/state", "1", at_s=0.0)
    of_first = ["checkpoint-1/model"]
    assert one.collect(is_last=False) == [*of_first, "logs/old.txt", "old.pt"]
    shutil.rmtree(one.path / "logs")
    shutil.rmtree(one.path / "checkpoint-2")
    assert one.collect(is_last=True) == [*of_first, "new.pt", "old.pt"]
    shutil.rmtree(one.path / "checkpoint-1")
    assert one.collect(generation=3) == ["new.pt", "old.pt"]
    one.write("zombie.pt", "1")
    assert one.collect(generation=2) is None
    assert [file.name for file in read_manifests(one.storage)[0].files] == ["new.pt", "old.pt"]


def test_a_directory_that_the_program_removes_meanwhile_is_not_kept_in_part(node: Callable[..., Node]) -> None:
    one = node()
    for number in range(64):
        one.write(f"checkpoint-1/{number}", "1", at_s=-100.0 - number)

    def remove(_: str) -> None:
        shutil.rmtree(one.path / "checkpoint-1", ignore_errors=True)

    collected = one.outputs.collect(Writer(0, 1, 1), is_last=False, note=remove)
    assert collected is not None and collected.manifest.files == ()


def test_another_node_goes_on_from_the_files_of_the_job(node: Callable[..., Node]) -> None:
    first, other, later = node("a"), node("b", 1), node("c")
    first.write("last.pt", "step 40")
    first.write("logs/same.txt", "same")
    first.write("log.txt", "of node 0")
    first.write("node-1/log.txt", "of the program itself")
    first.write("empty", "")
    first.write("tool", "#!/bin/sh")
    (first.path / "tool").chmod(0o700)
    of_first = ["empty", "last.pt", "log.txt", "logs/same.txt", "node-1/log.txt", "tool"]
    assert first.collect() == of_first
    for name, text in (("log.txt", "of node 1"), ("logs/same.txt", "same"), ("only.txt", "here")):
        other.write(name, text)
    clashes = other.outputs.collect(Writer(1, 1, 1), is_last=True, note=_ignore)
    assert clashes is not None and clashes.clashes == ("log.txt",)
    names = {one.name: one.node for one in merged(read_manifests(first.storage))}
    assert names == {**dict.fromkeys(of_first, 0), "node-1/node-1/log.txt": 1, "only.txt": 1}

    assert later.outputs.restore(2, None, note=_ignore) == 7
    assert later.read() == {**first.read(), "only.txt": "here"}
    assert os.access(later.path / "tool", os.X_OK) and not os.access(later.path / "empty", os.X_OK)
    assert later.outputs.restore(2, None, note=_ignore) == 0, "once for each attempt"
    assert later.collect(generation=2) == of_first, "they stay files of node 0"
    later.write("last.pt", "step 60", at_s=-1.0)
    later.collect(generation=2)
    assert first.outputs.restore(3, None, note=_ignore) > 0 and first.read()["last.pt"] == "step 60"
    later.write("last.pt", "step 80", at_s=0.0)
    assert later.outputs.restore(3, None, note=_ignore) == 0 and later.read()["last.pt"] == "step 80"


def test_a_node_that_gets_another_number_goes_on_from_the_files_of_that_number(node: Callable[..., Node]) -> None:
    first, other = node("a"), node("b", 1)
    first.write("last.pt", "step 40")
    first.collect()
    assert other.outputs.restore(1, 0, note=_ignore) == 1 and other.read() == {"last.pt": "step 40"}
    assert first.outputs.restore(1, 0, note=_ignore) == 0, "it has written them itself"


def test_the_first_worker_of_a_node_collects_after_a_checkpoint_and_at_the_end(node: Callable[..., Node]) -> None:
    one, said = node(), list[str]()
    root = str(Path(one.storage.url).parent)
    keepers = [OutputKeeper(one.directory, root, OutputsSpec(), said.append) for _ in range(2)]
    assert [keeper.finish(5.0) for keeper in keepers] == [False, False], "they were in no group"
    for local_rank, keeper in enumerate(keepers):
        keeper.begin(_assignment(local_rank), _ignore)
        one.write(f"{local_rank}.pt", "1")

    def stored() -> list[str]:
        return [file.name for manifest in read_manifests(one.storage).values() for file in manifest.files]

    keepers[1].collect_soon()
    keepers[0].collect_soon()
    deadline_mono = time.monotonic() + 30.0
    while stored() != ["0.pt", "1.pt"]:
        assert time.monotonic() < deadline_mono and not said, said
        time.sleep(0.005)  # what another thread writes into a directory cannot be waited for
    one.write("last.pt", "1", at_s=0.0)
    one.write("a\nb", "1")
    assert keepers[1].finish(30.0) and stored() == ["0.pt", "1.pt", "last.pt"]
    assert len(said) == 1 and "'a\\nb' is not kept" in said[0]
    Path(one.storage.url).rename(f"{root}/gone")
    Path(one.storage.url).write_text("no directory")
    one.write("more.pt", "1")
    assert keepers[0].finish(30.0) and len(said) == 2 and "could not be stored" in said[1]


def test_a_name_that_two_nodes_have_written_is_said_once(node: Callable[..., Node]) -> None:
    first, other, said = node("a"), node("b", 1), list[str]()
    keeper = OutputKeeper(other.directory, str(Path(other.storage.url).parent), OutputsSpec(), said.append)
    keeper.begin(assignment(job_id="job-1", rank=1, node_rank=1, layout=replicated(2)), _ignore)
    first.write("log.txt", "of node 0")
    first.collect()
    for text in ("of node 1", "of node 1, again"):
        other.write("log.txt", text, at_s=-float(len(text)))
        assert keeper.finish(30.0)
    [line] = said
    assert "several nodes have written log.txt" in line and "lies below node-1/" in line


def _assignment(local_rank: int) -> Assignment:
    return assignment(job_id="job-1", rank=local_rank, local_rank=local_rank, layout=replicated(2))


def test_a_hostile_storage_leads_nowhere(node: Callable[..., Node], tmp_path: Path) -> None:
    for name in ("../x", "/etc/x", "a/../../x", "a//x", "", ".", "a\nb", "a\\b"):
        with pytest.raises(ValidationError):
            OutputFile(name=name, bytes=1, modified_ns=1, sha256="0" * 64, content="0" * 32)
    with pytest.raises(ValidationError):
        OutputFile(name="x", bytes=1, modified_ns=1, sha256="0" * 64, content="../secret")
    writer, reader = node("a"), node("b")
    for name in ("folder/a.pt", "b.pt", "c.pt", "d.pt"):
        writer.write(name, "new")
    writer.collect()
    [manifest] = read_manifests(writer.storage).values()
    content = {file.name: tmp_path / "storage/job-1" / FOLDER / "0" / file.content for file in manifest.files}
    secret = tmp_path / "secret"
    secret.write_text("new")
    content["c.pt"].unlink()
    content["c.pt"].symlink_to(secret)
    content["d.pt"].write_text("bad")
    outside = tmp_path / "outside"
    outside.mkdir()
    (reader.path / "folder").symlink_to(outside)
    (reader.path / "b.pt").symlink_to(secret)
    reader.outputs.restore(2, None, note=_ignore)
    assert list(outside.iterdir()) == [] and secret.read_text() == "new"
    assert sorted(path.name for path in reader.path.iterdir()) == ["b.pt", "folder"]
    assert not (reader.path / "b.pt").is_symlink() and (reader.path / "b.pt").read_text() == "new"
    (tmp_path / "storage/job-1" / FOLDER / "1").symlink_to(tmp_path / "storage/job-1" / FOLDER / "0")
    (tmp_path / "storage/job-1" / FOLDER / "2").mkdir()
    hostile = OutputManifest(directory="x", attempt=1, generation=1).model_dump_json().replace('"x"', "7")
    (tmp_path / "storage/job-1" / FOLDER / "2" / "files.json").write_text(hostile)
    assert list(read_manifests(writer.storage)) == [0]


def test_directories_of_deleted_jobs_are_removed_when_another_job_starts(
    tmp_path: Path, directory: Callable[[Path, Path], JobDirectory]
) -> None:
    base, storage = tmp_path / "jobs", tmp_path / "storage"
    for number in (1, 2, 3):
        (storage / f"job-{number}" / FOLDER).mkdir(parents=True)
        ended = directory(base, storage / f"job-{number}")
        ended.open(None, "", _ignore)
        ended.close()
        at = time.time() - (31 * 86_400 if number == 3 else 3600)
        os.utime(base / f"{ended.path.name}.use", (at, at))
    (storage / "job-1" / FOLDER).rmdir()
    another = directory(base, storage / "job-4")
    another.open(None, "", _ignore)
    another.sweep()
    assert sorted(path.name.partition("-")[2][0] for path in base.iterdir() if path.is_dir()) == ["2", "4"]
