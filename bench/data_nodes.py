"""How the time to tokenise a corpus falls with the nodes that share its cache directory.

    python bench/data_nodes.py [--mib 16] [--nodes 1,2] [--portion-mib 1] [--rounds 3]

A node is a process with a core of its own, which tokenises itself; so `--nodes` has at most as many as there are cores.
The text is sources of the standard library as JSON lines, in a file for each portion, and the tokenizer a BPE of 8,000
tokens that is trained on some of them (needs the extra `hf`). The last line is JSON, for each number of nodes the
minimum, the median and the maximum of the rounds: megabytes of text per second of wall-clock time, and per second of
the CPU time of all nodes, which the division makes smaller.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.append(str(Path(__file__).parents[1] / "tools"))
sys.path.append(str(Path(__file__).parent))

from data import library_sources, trained_tokenizer
from measurements.machine import describe
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.prepare import Sharing, prepare_corpus

_MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--nodes", default="1,2")
    parser.add_argument("--portion-mib", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--node", help="for the program itself: settings of one node, as JSON")
    arguments = parser.parse_args()
    if arguments.node:
        _run_node(**json.loads(arguments.node))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _write_rows(directory / "text", arguments.mib, arguments.portion_mib)
        tokenizer = trained_tokenizer(directory / "tokenizer.json")
        found: dict[int, list[tuple[float, float]]] = {}
        for turn, num in itertools.product(range(arguments.rounds), map(int, arguments.nodes.split(","))):
            config = TextDataConfig(
                paths=(str(directory / "text"),), tokenizer=tokenizer, cache_dir=str(directory / f"cache-{turn}-{num}")
            )
            found.setdefault(num, []).append(_measured(config, num, arguments.portion_mib))
            wall, cpu = found[num][-1]
            print(f"{num} nodes {wall:7.2f} MB/s, {cpu:7.2f} MB per second of CPU time", flush=True)
    ranges = {
        num: {
            kind: [round(f(values), 3) for f in (min, statistics.median, max)]
            for kind, values in zip(("wall_mb_per_s", "cpu_mb_per_s"), zip(*rounds, strict=True), strict=True)
        }
        for num, rounds in found.items()
    }
    print(json.dumps({"machine": describe(), "load": os.getloadavg()[0], **ranges}))


def _measured(config: TextDataConfig, num_nodes: int, portion_mib: int) -> tuple[float, float]:
    """From the time at which all nodes have imported what they need."""
    nodes = []
    for number in range(num_nodes):
        settings = {"config": config.model_dump_json(), "number": number, "portion_bytes": portion_mib * _MIB}
        command = [sys.executable, __file__, "--node", json.dumps(settings)]
        nodes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        answers: list[str] = []
        for node in nodes:
            assert node.stdout is not None
            assert node.stdout.readline() == "ready\n"
        start = time.perf_counter()
        for node in nodes:
            assert node.stdin is not None
            node.stdin.close()
        for node in nodes:
            assert node.stdout is not None
            answers.append(node.stdout.readline())
        wall_s = time.perf_counter() - start
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    documents = [json.loads(answer) for answer in answers]
    assert len({one["content_hash"] for one in documents}) == 1
    megabytes = documents[0]["text_bytes"] / 1e6
    return megabytes / wall_s, megabytes / sum(one["cpu_s"] for one in documents)


def _run_node(config: str, number: int, portion_bytes: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    import tokenizers  # noqa: F401  its import is not measured

    print("ready", flush=True)
    sys.stdin.read()
    before = time.process_time()
    corpus = prepare_corpus(
        TextDataConfig.model_validate_json(config),
        lambda _: None,
        num_processes=0,
        sharing=Sharing(machine=f"node-{number}", portion_bytes=portion_bytes),
    )
    found = {"text_bytes": corpus.index.text_bytes, "content_hash": corpus.index.content_hash}
    print(json.dumps({**found, "cpu_s": time.process_time() - before}), flush=True)


def _write_rows(directory: Path, mib: int, portion_mib: int) -> None:
    directory.mkdir()
    sources = itertools.cycle(library_sources())
    for number in range(mib // portion_mib):
        with (directory / f"{number:03d}.jsonl").open("wb") as file:
            while file.tell() < portion_mib * _MIB:
                row = {"number": number, "text": next(sources).read_text(errors="replace")}
                file.write(json.dumps(row).encode() + b"\n")


if __name__ == "__main__":
    main()
