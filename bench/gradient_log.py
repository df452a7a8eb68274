"""The gradient log: bytes on the wire, share of the step time, and the time that a replay takes.

    python bench/gradient_log.py [--trials 3] [--steps 40] [--tokens 2048 384]
    python bench/gradient_log.py --wire [--trials 3]

The model with 10 M parameters on 4 ranks of 2 nodes, all on this machine, with the log on and off in turns. A step's
time is the median of the steps after warm-up, and the cost the median over the trials of (on - off) / off. Because
other load disturbs it, the share of CPU seconds that both sides of the log spend in a step is given as well. Bytes are
those of gradients, commits and whole copies, against the bytes of the reduced gradients. The last line is JSON.

`wire`: only a log, from one process to another, 10 MB of gradients a step: CPU milliseconds per MB of each side, page
faults and waits, first while entries get their memory, then while it is reused. A round is 20 steps and a whole copy.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import yaml

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("bench", "tests", "tools"))

from kit.processes.fleet import Fleet, Job, RemoteWorker
from kit.worlds import log_partner
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.snapshots import SnapshotServer
from shoal_workers.contract.worker_reports import GroupFormed, SnapshotCost, StepReport
from shoal_workers.snapshot_store.log.records import Commit, CommitBlob, encode
from shoal_workers.snapshot_store.slots.buddy_slots import STEPS_PER_COPY
from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.snapshot_store.transfer.requests import Part, Request, Verb, call
from shoal_workers.snapshot_store.transfer.wire import connect

_WARM_UP_STEPS = 8
_WORLD = 4
_SHAPES = {2048: (8, 256, 2), 384: (12, 32, 3)}
"""Samples, length of a sample, and samples of a micro-batch, by the tokens of a step."""
_WIRE_TENSORS, _WIRE_ELEMENTS, _WIRE_ROUNDS = 80, 31_250, 4
_EXAMPLE = Path(__file__).parents[1] / "examples" / "lm-10m.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 384], choices=sorted(_SHAPES))
    parser.add_argument("--wire", action="store_true", help="only a log from one process to another")
    arguments = parser.parse_args()
    if arguments.wire:
        _wire(arguments.trials)
        return
    answer: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, torch threads 1, gloo", "ranks": _WORLD}
    for tokens in arguments.tokens:
        trials: dict[str, list[dict[str, Any]]] = {"off": [], "auto": []}
        for number in range(arguments.trials):
            for mode, results in trials.items():
                results.append(_run(tokens, mode, arguments.steps))
                shown = ", ".join(f"{name} {value}" for name, value in results[-1].items())
                print(f"{tokens} tokens, trial {number + 1}, log {mode}: {shown}", flush=True)
        answer[str(tokens)] = _summary(trials)
    print(json.dumps(answer))


def _summary(trials: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    pairs = list(zip(trials["off"], trials["auto"], strict=True))
    on = trials["auto"]
    return {
        "step_ms_off": round(statistics.median(t["step_ms"] for t in trials["off"]), 1),
        "step_ms_on": round(statistics.median(t["step_ms"] for t in on), 1),
        "cost": round(statistics.median(b["step_ms"] / a["step_ms"] - 1 for a, b in pairs), 4),
        "cpu_share": round(statistics.median(t["log_share"] for t in on), 4),
        "wire": round(statistics.median(t["wire"] for t in on), 3),
        "replay_ms": round(statistics.median(t["replay_ms"] for t in on), 1),
        "replayed_steps": on[-1]["replayed_steps"],
    }


def _run(tokens: int, mode: str, steps: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm") as memory,
    ):
        fleet = Fleet(Path(folder))
        try:
            job = Job(fleet, _spec(tokens, mode, steps), Path(folder) / "job", Path(memory))
            workers = [*job.workers(_WORLD // 2, "n1"), *job.workers(_WORLD // 2, "n2")]
            for worker in workers:
                worker.call("prepare")
            job.start(workers, buddy_of=lambda rank: workers[(rank + _WORLD // 2) % _WORLD])
            ends = [worker.exit(timeout_s=600.0) for worker in workers]
            assert [end.kind for end in ends] == [ExitKind.FINISHED] * _WORLD, [end.error for end in ends]
            return _figures(workers, tokens, steps, is_logged=mode == "auto")
        finally:
            fleet.close()


def _figures(workers: list[RemoteWorker], tokens: int, steps: int, *, is_logged: bool) -> dict[str, Any]:
    reports = [item for worker in workers for item in worker.poll()]
    done = [item for item in reports if isinstance(item, StepReport)]
    assert {item.tokens for item in done} == {tokens}, done[:1]
    times = [item.step_s for item in done if item.step > _WARM_UP_STEPS]
    figures: dict[str, Any] = {"step_ms": round(1000 * statistics.median(times), 1)}
    if not is_logged:
        return figures
    (formed,) = [item for item in reports if isinstance(item, GroupFormed)]
    shares = [item.log_share for item in reports if isinstance(item, SnapshotCost) and item.log_lag_steps is not None]
    sent = sum(sum(worker.call("sent_bytes")) for worker in workers)
    figures["log_share"] = round(shares[-1], 4)
    figures["wire"] = round(sent / (4 * formed.num_parameters * (steps - 1)), 3)
    figures["replay_ms"], figures["replayed_steps"] = _replay(workers[_WORLD // 2], steps)
    return figures


def _replay(buddy: RemoteWorker, newest: int) -> tuple[float, int]:
    """Measures how long the buddy of rank 0 takes to make its newest part, and from how many entries."""
    with connect(buddy.snapshot_server, "key", check=lambda: None, patience_s=60.0) as wire:
        parts = call(wire, Request(verb=Verb.LIST)).snapshot_parts
        assert any((part.rank, part.step) == (0, newest) for part in parts), parts
        start_s = time.perf_counter()
        call(wire, Request(verb=Verb.FIND, part=Part(generation=parts[-1].generation, rank=0, step=newest)))
        seconds = time.perf_counter() - start_s
    copies = {part.step for part in parts if part.rank == 0}
    return round(1000 * seconds, 1), (newest - 1) % STEPS_PER_COPY if len(copies) > 1 else 0


def _wire(trials: int) -> None:
    print("| round | sender: ms/MB | faults/MB | waits/MB | buddy: ms/MB | faults/MB | waits/MB | both: ms/MB |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    rounds = [one for _ in range(trials) for one in _wire_trial()]
    for name in ("new", "reused"):
        found = [numbers for kind, numbers in rounds if kind == name]
        cells = [statistics.median(numbers[column] for numbers in found) for column in range(len(found[0]))]
        print(f"| {name} | {' | '.join(f'{cell:.3f}' for cell in cells)} | {cells[0] + cells[3]:.3f} |", flush=True)


def _wire_trial() -> list[tuple[str, list[float]]]:
    """For each round: whether its entries were new, and the numbers of both sides per MB."""
    torch.set_num_threads(1)
    log_partner.SHAPES = {f"p{number}": (_WIRE_ELEMENTS,) for number in range(_WIRE_TENSORS)}
    gradients = [torch.randn(_WIRE_ELEMENTS) for _ in range(_WIRE_TENSORS)]
    views = [gradient.view(torch.uint8).numpy().data for gradient in gradients]
    num_mb = STEPS_PER_COPY * _WIRE_TENSORS * _WIRE_ELEMENTS * 4 / 1e6
    found = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm") as root:
        ours, theirs = multiprocessing.Pipe()
        buddy = multiprocessing.get_context("fork").Process(target=_wire_buddy, args=(theirs, root))
        buddy.start()
        server = SnapshotServer(node_id="b", host="127.0.0.1", port=ours.recv())
        store = _wire_store(root, "a")
        try:
            partner = log_partner.LogPartner(store)
            log = partner.open(server)
            for number in range(_WIRE_ROUNDS):
                before = [_usage(), _ask(ours)]
                for _ in range(STEPS_PER_COPY):
                    log.append(partner.number + 1, views)
                    log.wait(log_partner.nothing, patience_s=20.0)
                    log.commit(partner.number + 1, _wire_commit(partner.number))
                    partner.number += 1
                log.wait(log_partner.nothing, patience_s=20.0)
                after = [_usage(), _ask(ours)]
                assert not log.failure, log.failure
                pairs = [pair for a, b in zip(before, after, strict=True) for pair in zip(a, b, strict=True)]
                # between the first and the last round some entries are new, and others are reused
                kind = {0: "new", _WIRE_ROUNDS - 1: "reused"}.get(number, "mixed")
                found.append((kind, [(end - start) / num_mb for start, end in pairs]))
                partner.copy(server)
        finally:
            ours.send("end")
            buddy.join()
            store.close()
    return found


def _wire_buddy(connection: Connection, root: str) -> None:
    store = _wire_store(root, "b")
    connection.send(store.port)
    while connection.recv() != "end":
        connection.send(_usage())
    store.close()


def _wire_store(root: str, node: str) -> SnapshotStore:
    folder = Path(root) / node
    folder.mkdir()
    return SnapshotStore(job_id="bench", attempt=1, worker_id=node, node_id=node, key="key", root=folder)


def _wire_commit(step: int) -> bytes:
    commit = Commit(
        step=step + 1,
        previous=step,
        is_bf16=False,
        unscale=1.0,
        clip=1.0,
        lrs=(0.1, 0.1),
        counts=(step,) * _WIRE_TENSORS,
        changed=(),
        extra_bytes=0,
    )
    return encode(CommitBlob(commit, (), b""))


def _ask(connection: Connection) -> tuple[float, ...]:
    connection.send("usage")
    answer: tuple[float, ...] = connection.recv()
    return answer


def _usage() -> tuple[float, ...]:
    """Reads CPU milliseconds, page faults and waits of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (used.ru_utime + used.ru_stime), used.ru_minflt, used.ru_nvcsw


def _spec(tokens: int, mode: str, steps: int) -> dict[str, Any]:
    spec: dict[str, Any] = {"task": LM_TASK} | yaml.safe_load(_EXAMPLE.read_text())
    size, length, micro = _SHAPES[tokens]
    spec["model"] = spec["model"] | {"seq_len": length}
    spec["batch"] = {"global_size": size, "micro_size": micro}
    spec["stop"] = {"steps": steps}
    spec["elasticity"] = {"min_workers": 1, "max_workers": _WORLD}
    spec["checkpoint"] = {"every_steps": 10 * steps}
    spec["validation"] = {"samples": 0}
    spec["snapshot"] = {"gradient_log": mode}
    return spec


if __name__ == "__main__":
    main()
