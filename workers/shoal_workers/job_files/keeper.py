"""When the outputs of a job are restored and collected, for one worker.

    prepare       the directory gets what the storage has, once for each attempt
    begin         a node with another number than before goes on from the files of that number (rank 0's node is 0)
    thread        collects after each checkpoint, and every EVERY_S; it takes at most a twentieth of the time
    finish        the attempt ends: collects the last time

The first worker of each node collects. An error of the storage is said once, and never ends the training.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from shoal_workers.contract import Assignment, OutputsSpec
from shoal_workers.job_files.directory import JobDirectory
from shoal_workers.job_files.outputs import Note, Outputs, Writer

EVERY_S = 60.0
_PAUSE_FACTOR = 19.0
"""Pause after a collection in units of its duration."""
_NICENESS = 10
_STALL_S = 20.0
"""The end of an attempt waits no longer for a storage that takes nothing."""


class OutputKeeper:
    """The module docstring says what is called when."""

    def __init__(
        self, directory: JobDirectory, checkpoint_root: str, spec: OutputsSpec, say: Callable[[str], None]
    ) -> None:
        """`say`: adds a line to the job's log; any thread."""
        self._directory = directory
        self._outputs = Outputs(directory, checkpoint_root, spec)
        self._is_on = bool(spec.keep)
        self._say = say
        self._said: set[str] = set()
        self._writer: Writer | None = None
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._finishing: Future[bool] | None = None
        self._advanced_mono = 0.0

    def prepare(self, attempt: int, note: Note) -> None:
        """Training thread, before the program is loaded. Raises OSError."""
        if self._is_on:
            self._outputs.restore(attempt, None, note=note)

    def begin(self, assignment: Assignment, note: Note) -> None:
        """Training thread, before a generation. Raises OSError."""
        before, writer = self._writer, Writer(assignment.node_rank, assignment.attempt, assignment.generation)
        self._writer = writer
        if not self._is_on or assignment.local_rank:
            return
        if before is None or (before.node, before.generation + 1) != (writer.node, writer.generation):
            self._outputs.restore(writer.attempt, writer.node, note=note)
        if self._thread is None:
            self._thread = threading.Thread(target=self._collect_again, name="shoal-outputs", daemon=True)
            self._thread.start()

    def collect_soon(self) -> None:
        """Any thread: a checkpoint was saved, or the group has ended."""
        self._wanted.set()

    def finish(self, within_s: float) -> bool | None:
        """Any thread: collect the last time, since the attempt ends or the group stops.

        Returns:
            True once it is done; None if it is not after `within_s` seconds, then it goes on; False if this worker
            cannot: it has trained in no group, or not in the newest one.
        """
        if not self._is_on or self._writer is None:
            return not self._is_on
        with self._lock:
            if self._finishing is None:
                self._advanced_mono = time.monotonic()
                self._finishing = ThreadPoolExecutor(1).submit(self._collect, self._writer, is_last=True)
            finishing = self._finishing
        try:
            is_done = finishing.result(within_s)
        except TimeoutError:
            if time.monotonic() - self._advanced_mono < _STALL_S:
                return None
            self._say_once(
                "stalled", f"the storage has taken nothing for {_STALL_S:g} s, so the last files are missing"
            )
            return True
        self._finishing = None
        return is_done

    def _collect_again(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        except OSError:
            pass
        try:
            self._directory.sweep()
        except OSError as error:
            self._say_once("sweep", f"directories of former jobs stay on this node: {error}")
        pause_s = 0.0
        while True:
            time.sleep(pause_s)
            self._wanted.wait(EVERY_S)
            self._wanted.clear()
            start = time.monotonic()
            assert self._writer is not None
            self._collect(self._writer, is_last=False)
            pause_s = _PAUSE_FACTOR * (time.monotonic() - start)

    def _collect(self, writer: Writer, *, is_last: bool) -> bool:
        try:
            collected = self._outputs.collect(writer, is_last=is_last, note=self._note_progress)
        except OSError as error:
            self._say_once("failed", f"the files of the job could not be stored: {type(error).__name__}: {error}")
            return True
        if collected is None:
            return False
        manifest = collected.manifest
        if manifest.num_left_out:
            size_mib = manifest.bytes_left_out / 2**20
            self._say_once(
                "limit",
                f"{manifest.num_left_out} files with {size_mib:.0f} MiB are not kept, since newer ones fill "
                "outputs.max_gib. Raise it, or name what to keep in outputs.keep.",
            )
        if collected.unnamed:
            self._say_once(
                "unnamed",
                f"{collected.unnamed[:80]!a} is not kept, as no file is whose name is very long or has characters that "
                "cannot be printed, or a backslash.",
            )
        if collected.clashes:
            self._say_once(
                "clash",
                f"several nodes have written {collected.clashes[0]}. The file of rank 0's node counts; that of this "
                f"node lies below node-{writer.node}/.",
            )
        return True

    def _note_progress(self, _: str) -> None:
        self._advanced_mono = time.monotonic()

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"outputs: {text}")
