"""What the readers of data make of damaged files: docs/measured/damaged-inputs.md.

    python bench/damaged.py [--every 1000] [--out docs/measured/damaged-inputs.md]

The files and the damages are those of tests/kit/worlds/damaged_inputs.py. They are read in another process,
and in a new one after a reader that has crashed. Ends with 1 if a file was read in another way than the table
allows.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from kit.worlds.damaged_inputs import FORMATS, Outcome, readings

_Counts = dict[tuple[str, Outcome], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1000, help="bytes between two cuts, and between two swaps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts: dict[str, _Counts] = {}
    messages: dict[str, str] = {}
    wrong: list[str] = []
    names, context = list(FORMATS), multiprocessing.get_context("spawn")
    while names:
        with ProcessPoolExecutor(1, context) as process:
            try:
                while names:
                    name = names.pop(0)
                    counts[name], messages[name], wrong_here = process.submit(_read, name, options.every).result()
                    wrong += wrong_here
                    print(f"{name}: {len(wrong_here)} wrong", flush=True)
            except BrokenProcessPool:
                wrong.append(f"{name}: its reader has crashed")
    page = _page(options.every, counts, messages)
    if options.out is not None:
        options.out.write_text(page, encoding="utf-8")
    print(page)
    if wrong:
        raise SystemExit("\n".join(wrong))


def _read(name: str, every: int) -> tuple[_Counts, str, list[str]]:
    """How often each damage had each outcome, the first message of a cut file, and what is wrong."""
    warnings.simplefilter("ignore")
    counts: _Counts = collections.Counter()
    first, wrong = "", list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for kind, which, bad_rows, outcome, message in readings(name, Path(folder), every):
            counts[kind, outcome] += 1
            if outcome is Outcome.WRONG:
                wrong.append(f"{name}, {which}, bad_rows {bad_rows}: {message}")
            elif outcome is Outcome.REFUSED and not first:
                first = message.replace(f"{folder}/", "").replace("|", "\\|").replace("\n", " ")
    return dict(counts), first, wrong


_KINDS = ("none", "cut", "halves swapped", "two bytes swapped", "empty", "wrong type", "wrong encoding")


def _page(every: int, counts: dict[str, _Counts], messages: dict[str, str]) -> str:
    total = sum(number for of_format in counts.values() for number in of_format.values())
    rows = [f"| format | {' | '.join(_KINDS)} |", f"|---{'|---' * len(_KINDS)}|"]
    for name, of_format in counts.items():
        cells = [
            "<br>".join(f"{number} {outcome}" for (one, outcome), number in of_format.items() if one == kind)
            for kind in _KINDS
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    told = [f"| {name} | {message} |" for name, message in messages.items()]
    return _HEAD.format(every=every, total=total) + "\n".join([*rows, "", _MESSAGES, *told, ""])


_HEAD = """# Damaged inputs

Small files of each format, cut at every {every:,}th byte, with two bytes swapped there, empty, of another type or in
another encoding, read by the task or the reader of the format: {total:,} readings. Made by `make bench-damaged`, which
fails if a reading has another outcome than these:

- read whole: every row as in the undamaged file;
- refused, with the file: an error that names the file, and the row where there is one;
- rows left out and counted: with `bad_rows: skip`, and all other rows are those of the file;
- a whole file of fewer lines: text, JSON lines and CSV have no end mark, so a cut behind a line is not noticed;
- as many rows, with other values: the format has no checksum, or any content is a text.

Names that begin with t are read as documents, a by tasks for labelled rows (with both values of `bad_rows`), e by tasks
for answers, b as shards of other libraries; the others are images and audio.

"""
_MESSAGES = """## The first message of each

| format | message |
|---|---|"""

if __name__ == "__main__":
    main()
