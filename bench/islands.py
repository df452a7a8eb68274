"""What merging costs two islands behind a slow link, beside an all-reduce of the gradients: `make bench-islands`.

    python bench/islands.py [--steps 256] [--rows none,bf16,int8,sparse,fragments] [--out docs/measured/islands.md]

Two islands of one worker each train the built-in language model. Their storage is an S3 server (moto), which each
reaches through a proxy of its own of 10 Mbit/s and 100 ms in each direction. A step computes and then sleeps 200 ms, as
if an accelerator computed. Each row is run twice, with that link and with an unshaped one; there is one run without
rounds, and one of a single job that trains all batches. Links are unshaped once the last step is done, so that the last
checkpoint does not count. The all-reduce moves the bytes of a ring of two through such a link. 20 minutes, offline.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("bench", "tests", "tools"))

import s3fs

from choices import some_of
from kit.processes.fleet import Fleet, Job, RemoteWorker
from kit.processes.object_store import environment_of_s3, s3_server
from kit.processes.played_rounds import PlayedRounds
from kit.processes.proxy import Proxy
from kit.processes.warm import Zygote
from measurements.machine import describe
from shoal_service.core.islands import Contribution
from shoal_workers.contract.islands import IslandsSpec
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport, ValidationReport
from shoal_workers.tasks.lm import LanguageModel

BYTES_PER_S, DELAY_S = 10e6 / 8, 0.1
EVERY_STEPS = 64
PACE_S = 0.2
STEP_S = 0.25
"""About what a step takes, beside the time of an all-reduce."""
GRACE_S = 60.0
_POLL_S = 0.25
_TRIALS = 3
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {"compress": "none", "lands_after_steps": 60}),
    "bf16": ("bf16", {"compress": "bf16", "lands_after_steps": 42}),
    "int8": ("int8", {"compress": "int8", "lands_after_steps": 42}),
    "sparse": ("sparse, density 0.02", {"compress": "sparse", "density": 0.02, "lands_after_steps": 60}),
    "fragments": (
        "bf16, 4 fragments",
        {"compress": "bf16", "fragments": 4, "every_steps": 2 * EVERY_STEPS, "lands_after_steps": 30},
    ),
}
"""A round lands after as many steps as it was seen to need over this link, and some more."""
SPEC: dict[str, Any] = {
    "task": "paced_text:PacedText",
    "data": {"corpus": "python-stdlib", "max_bytes": 2_000_000},
    "model": {"dim": 144, "num_layers": 4, "num_heads": 8, "seq_len": 64, "pace_s": PACE_S},
    "batch": {"global_size": 4, "micro_size": 4},
    "optimizer": {"lr": 2e-3},
    "schedule": {"warmup_steps": 20},
    "elasticity": {"max_workers": 1},
    "validation": {"samples": 512},
    "seed": 3,
}


@dataclass
class Run:
    """What one run of one or two islands was seen to do."""

    reports: list[dict[int, StepReport]] = field(default_factory=list)
    """By island and step."""
    landed: list[dict[int, int]] = field(default_factory=list)
    """By island: the step of each round."""
    contributions: list[Contribution] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """By island, of the validation after the last step."""

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses)

    @property
    def wall_s(self) -> float:
        """From the end of the first step to that of the last, of the slower island."""
        return max(steps[max(steps)].at - steps[1].at for steps in self.reports)

    @property
    def own_s(self) -> float:
        """The time of all steps but the first without that in which others had the CPU, mean of the islands."""
        spent = (_own_s(report) for steps in self.reports for report in steps.values() if report.step > 1)
        return sum(spent) / len(self.reports)

    def step_s(self) -> float:
        return statistics.median(_own_s(report) for steps in self.reports for report in steps.values())

    def waited_s(self) -> float:
        """What an island has announced that it waited for all rounds but the last, mean of the islands."""
        newest = {contribution.island: contribution for contribution in self.contributions}
        return statistics.mean(contribution.waited_s for contribution in newest.values())

    def lost_s(self) -> tuple[float, float]:
        """Seconds beyond a median step, mean of the islands: of the steps that took rounds, waits included, and of
        those that sent differences."""
        usual_s, takes_s, sends_s = self.step_s(), 0.0, 0.0
        sent = {(contribution.island, contribution.step) for contribution in self.contributions}
        for island, (steps, landed) in enumerate(zip(self.reports, self.landed, strict=True)):
            takes = set(landed.values())
            sends = {step for at, step in sent if at == island} - takes
            takes_s += sum(_own_s(steps[step]) - usual_s for step in takes)
            sends_s += sum(_own_s(steps[step]) - usual_s for step in sends)
        return max(0.0, takes_s / len(self.reports)), max(0.0, sends_s / len(self.reports))


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="shoal-islands-") as folder, ExitStack() as stack:
        bench = Bench(Path(folder), options.steps, stack)
        lines = [bench.heading(), *bench.all_reduces()]
        print("\n".join(lines), flush=True)
        together = bench.run(None)
        apart = bench.run({"every_steps": options.steps + 1})
        lines.append(_before_the_table(together, apart))
        print(lines[-1], flush=True)
        for name in options.rows:
            settings = {"every_steps": EVERY_STEPS, **ROWS[name][1]}
            slow, fast = bench.run(settings, is_slow=True), bench.run(settings)
            lines.append(_row(name, settings, slow, fast, apart))
            print(lines[-1], flush=True)
    lines.append(_AFTER_THE_TABLE)
    if options.out is not None:
        options.out.write_text("\n".join(lines), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=256, help="of each island; the last round must land before the end"
    )
    parser.add_argument("--rows", type=some_of([*ROWS]), default=[*ROWS])
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


class Bench:
    """The S3 server, and for each island a link to it and processes that know no other way."""

    def __init__(self, folder: Path, num_steps: int, stack: ExitStack) -> None:
        self._num_steps = num_steps
        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line for each request
        endpoint = stack.enter_context(s3_server())
        os.environ |= environment_of_s3(endpoint)
        port = urlsplit(endpoint).port
        assert port is not None
        self._data = {**SPEC["data"], "cache_dir": str(folder / "data")}
        task = LanguageModel({name: value for name, value in SPEC["model"].items() if name != "pace_s"}, self._data, 3)
        task.prepare(lambda _: None)
        self.num_parameters = sum(parameter.numel() for parameter in task.build_model().parameters())
        self._links = [stack.enter_context(closing(Proxy(port))) for _ in range(2)]
        self._fleets = []
        for index, link in enumerate(self._links):
            zygote = stack.enter_context(closing(Zygote()))
            zygote.environment["AWS_ENDPOINT_URL"] = link.url
            self._fleets.append(stack.enter_context(closing(Fleet(folder / f"{index}", zygote))))

    def run(self, islands: dict[str, Any] | None, *, is_slow: bool = False) -> Run:
        """Train both islands to their ends. None: one job trains on the batches of both, unwatched."""
        storage = f"s3://bucket-{uuid.uuid4().hex}"
        s3fs.S3FileSystem().mkdir(storage)
        spec = {**SPEC, "data": self._data, "stop": {"steps": self._num_steps}}
        spec["checkpoint"] = {"every_steps": self._num_steps}
        if islands is None:
            size = 2 * SPEC["batch"]["global_size"]
            spec |= {"batch": {"global_size": size, "micro_size": size}, "model": {**SPEC["model"], "pace_s": 0.0}}
            return self._train([spec], storage)
        section = {"num": 2, "grace_s": GRACE_S, "run": "island-0", **islands}
        rounds = PlayedRounds(storage, IslandsSpec.model_validate(section), poll_s=_POLL_S)
        for link in self._links if is_slow else []:
            link.shape(BYTES_PER_S, DELAY_S)
        with closing(rounds):
            run = self._train([{**spec, "islands": {**section, "index": index}} for index in range(2)], storage)
        run.contributions = rounds.contributions
        return run

    def _train(self, specs: list[dict[str, Any]], storage: str) -> Run:
        jobs, groups = [], []
        for index, (fleet, spec) in enumerate(zip(self._fleets, specs, strict=False)):
            job = Job(fleet, spec, Path(), None)
            job.root = f"{storage}/island-{index}"
            jobs.append(job)
            groups.append(job.workers(1))
        for job, workers in zip(jobs, groups, strict=True):
            job.start(workers)
        open_links = dict(zip(self._links, groups, strict=False))
        while open_links:
            time.sleep(_POLL_S)
            for link, workers in list(open_links.items()):
                if self._num_steps in _steps(workers) or workers[0].gone.is_set():
                    link.shape()  # what comes now is the last checkpoint
                    del open_links[link]
        run = Run()
        for job, workers in zip(jobs, groups, strict=True):
            end = workers[0].exit()
            if end.kind is not ExitKind.FINISHED:
                raise SystemExit(f"an island ended {end.kind}: {end.error}")
            run.reports.append(_steps(workers))
            run.landed.append(_landings(workers[0]))
            run.losses.append(job.reported(workers, ValidationReport)[-1].loss)
        for fleet in self._fleets:
            fleet.kill_all()
        return run

    def all_reduces(self) -> Iterator[str]:
        """The lines of the all-reduces, with the time of each step that they would take."""
        yield "| gradients | bytes that each sends in a step | seconds (median of 3) | share of the time that is lost |"
        yield "|---|---:|---:|---:|"
        for name, width in (("fp32", 4), ("bf16", 2)):
            num_bytes = width * self.num_parameters
            seconds = statistics.median(_all_reduce_s(num_bytes) for _ in range(_TRIALS))
            hidden, added = 1 - STEP_S / seconds, seconds / (STEP_S + seconds)
            yield f"| {name} | {_megabytes(num_bytes)} | {seconds:.2f} | {hidden:.0%} to {added:.0%} |"

    def heading(self) -> str:
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
        machine = "; ".join([*describe().values(), f"load average {os.getloadavg()[0]:.1f} before"])
        tokens = self._num_steps * SPEC["batch"]["global_size"] * SPEC["model"]["seq_len"]
        return _HEADING.format(
            commit=commit.strip(),
            machine=machine,
            parameters=self.num_parameters / 1e6,
            steps=self._num_steps,
            tokens=tokens,
            pace_ms=1000 * PACE_S,
            step_ms=1000 * STEP_S,
        )


def _steps(workers: list[RemoteWorker]) -> dict[int, StepReport]:
    return {report.step: report for report in Job.reported(workers, StepReport)}


def _own_s(report: StepReport) -> float:
    """Seconds of a step without those in which others had the CPU."""
    return report.step_s - sum(report.cpu_wait_s)


def _landings(worker: RemoteWorker) -> dict[int, int]:
    texts = (re.search(r"round (\d+) has landed in step (\d+)", line.text) for line in worker.logs)
    return {int(match[1]): int(match[2]) for match in texts if match}


def _all_reduce_s(num_bytes: int) -> float:
    """Move the bytes of a ring all-reduce of two through a link: half of them both ways at once, twice."""
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(Proxy(listener.getsockname()[1])) as link:
        link.shape(BYTES_PER_S, DELAY_S)
        with socket.create_connection(("127.0.0.1", link.port)) as near, listener.accept()[0] as far:
            begun = time.monotonic()
            peer = threading.Thread(target=_exchange, args=(far, num_bytes // 2))
            peer.start()
            _exchange(near, num_bytes // 2)
            peer.join()
            return time.monotonic() - begun


def _exchange(peer: socket.socket, num_bytes: int) -> None:
    """Send and receive equally many bytes, twice: the second transfer needs what the first one has received."""
    for _ in range(2):
        sending = threading.Thread(target=peer.sendall, args=(bytes(num_bytes),))
        sending.start()
        left = num_bytes
        while left:
            left -= len(peer.recv(min(left, 1 << 20)))
        sending.join()


def _before_the_table(together: Run, apart: Run) -> str:
    return _MIDDLE.format(
        step_ms=1000 * apart.step_s(),
        own=apart.own_s,
        wall=apart.wall_s,
        loss=together.loss,
    )


def _row(name: str, islands: dict[str, Any], slow: Run, fast: Run, apart: Run) -> str:
    takes_s, sends_s = slow.lost_s()
    num_bytes = statistics.mean(contribution.num_bytes for contribution in slow.contributions)
    cells = [
        ROWS[name][0],
        _megabytes(num_bytes),
        f"{len(slow.landed[0])}",
        f"{islands['every_steps']}",
        f"{islands['lands_after_steps']}",
        f"{slow.waited_s():.2f}",
        f"{takes_s:.2f}",
        f"{sends_s:.2f}",
        f"{(takes_s + sends_s) / slow.own_s:.1%}",
        f"{slow.own_s:.1f} of {slow.wall_s:.1f}",
        f"{fast.own_s:.1f} of {fast.wall_s:.1f}",
        f"{1 - fast.own_s / slow.own_s:+.1%}",
        f"{1 - apart.own_s / slow.own_s:+.1%}",
        f"{slow.loss:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


_HEADING = """# Islands behind a slow link, measured

Made by `make bench-islands` at {commit}: {machine}.

Two [islands](../islands.md) of one worker each train a language model of {parameters:.2f} million parameters for
{steps} steps, {tokens:,} tokens each. Their storage is an S3 server that each reaches through a link of its own, with
10 Mbit/s and 100 ms in each direction. A step computes on one core and then sleeps {pace_ms:.0f} ms, as if an
accelerator computed. `lands_after_steps` is what a round was seen to need over this link, with some to spare: each
island writes one difference and reads two.

## An all-reduce in each step

The bytes of a ring all-reduce of two pass through such a link. The share is for steps of {step_ms:.0f} ms: the first
number if all of a step hid it, the second if nothing did.
"""
_MIDDLE = """
## Rounds

Without rounds the two islands need {own:.1f} of {wall:.1f} s, and {step_ms:.0f} ms a step. One job that trains the
batches of both, in as many steps of twice the size, has a validation loss of {loss:.3f} at its end.

Seconds are the mean of both islands. *Waited* is what the newest announcement says, for all rounds but the last.
*Takes* is how long steps that took a round lasted beyond the median step, waits included; *sends* the same of steps
that sent a difference. *Lost* is their share of the run's time. Of that time the first number is without the time in
which other processes had the CPU, and so are all figures before it; the second is the slower island's by the clock. The
two differences are of the first number: from the same run over a link that is not shaped, and from the islands without
rounds. The loss is that of the outer weights after the last step.

| `compress` | bytes a round and island | rounds | `every_steps` | `lands_after_steps` | waited, s | takes, s \
| sends, s | lost | run, s | not shaped, s | beyond not shaped | beyond no rounds | loss |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""
_AFTER_THE_TABLE = """
What the islands trained after their newest round ended is in no outer weights, and the loss is without it.
"""


if __name__ == "__main__":
    main()
