"""Draws the README's picture: an SVG of the output of `shoal demo`. `make picture` runs the demo and calls this.

COLUMNS=104 shoal demo | tee demo.txt; python tools/picture.py demo.txt docs/images/demo.svg
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

_WIDTH = 104
_STYLES = (
    (r"SIGKILL worker.*|worker .* lost.*|incident: .*", "bold red"),
    (r"incident closed.*|✓.*|SUCCEEDED.*", "bold green"),
    (r"generation \d.*|.*RECOVERING.*|.*RESIZING.*", "cyan"),
    (r"checkpoint of step.*|worker .* started.*|^RUNNING step.*|^STARTING.*", "dim"),
    (r"^[\d:]{8}", "dim"),
    (r"[●▲▽✗↑]", "yellow"),
)
_KEEP_PROGRESS_EVERY = 6
"""The picture shows every sixth progress line."""


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in _shortened(source.read_text().splitlines()):
        text = Text(line[:_WIDTH])
        for pattern, style in _STYLES:
            text.highlight_regex(pattern, style)
        console.print(text, highlight=False)
    svg = console.export_svg(title="make demo", theme=MONOKAI)
    svg = re.sub(
        r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL
    )  # use the viewer's monospace font instead of a download
    target.write_text(svg.replace("Fira Code", "DejaVu Sans Mono"))


def _shortened(lines: list[str]) -> list[str]:
    """The first job without most of its progress lines, the undisturbed job as one line, and the report."""
    kept, num_progress, num_jobs = [], 0, 0
    for line in lines:
        num_jobs += line.startswith("job ")
        progress = line.startswith(("RUNNING", "STARTING", "RESIZING", "RECOVERING"))
        num_progress += progress
        report = "╭" in line or (kept and kept[-1].startswith(("│", "╭")))
        if report:
            num_jobs = 0
        is_detail = num_jobs == 2 and not line.startswith("job ")
        is_noise = "checkpoint of step" in line and "committed" in line
        if not is_detail and not (progress and num_progress % _KEEP_PROGRESS_EVERY) and not is_noise:
            kept.append(line)
    return [line for line in kept if not line.startswith(("the server", "checkpoints  ", "jobs  ", "stop it"))]


if __name__ == "__main__":
    main()
