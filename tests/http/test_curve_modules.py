"""The modules that place, smooth and join curves, run by node, against numbers of Python."""

import base64
import json
import math
import statistics
import subprocess
from array import array
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kit.requirements import require

STATIC = files("shoal_api.http").joinpath("static")
STEPS = [10, 20, 30, 40]
JOB = {"tokens_per_step": 128, "samples_per_step": 32, "started_at": 1000.0, "created_at": 900.0}
AXES = {"step": STEPS, "time": [5, 10, 15, 20], "tokens": [1280, 2560, 3840, 5120], "samples": [320, 640, 960, 1280]}


def ran(folder: Path, script: str) -> Any:
    """Run a script that imports the module, and return what it prints as JSON."""
    (folder / "package.json").write_text('{"type": "module"}')
    for name in ("curve_data.js", "panel_lines.js"):
        (folder / name).write_text(STATIC.joinpath(name).read_text())
    imports = 'import * as data from "./curve_data.js";\nimport * as lines from "./panel_lines.js";\n'
    (folder / "main.js").write_text(f"{imports}console.log(JSON.stringify({script}));")
    node = require("node", "node", "nodejs")
    found = subprocess.run([node, str(folder / "main.js")], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def curve(values: list[float]) -> str:
    """A curve in the packed form of `GET /v1/curves`, a point each five seconds."""
    columns = {"step": array("d", STEPS), "at": array("d", [1000 + at / 2 for at in STEPS])}
    packed = {name: base64.b64encode(column.tobytes()).decode() for name, column in columns.items()}
    return json.dumps({**packed, "values": {"loss": base64.b64encode(array("f", values).tobytes()).decode()}})


@pytest.mark.parametrize("axis", AXES)
def test_points_are_placed_on_each_axis(tmp_path: Path, axis: str) -> None:
    script = f"[...data.positions({json.dumps(JOB)}, data.unpack({curve([4, 3, 2, 1])}), '{axis}')]"
    assert ran(tmp_path, script) == AXES[axis]


@pytest.mark.parametrize("axis", ["tokens", "samples"])
def test_a_job_that_reports_no_tokens_is_on_no_axis_of_them(tmp_path: Path, axis: str) -> None:
    job = {**JOB, "tokens_per_step": None, "samples_per_step": None}
    assert ran(tmp_path, f"data.positions({json.dumps(job)}, data.unpack({curve([4, 3, 2, 1])}), '{axis}')") is None


def test_smoothing_is_a_mean_whose_weights_halve_and_gaps_stay_gaps(tmp_path: Path) -> None:
    found = ran(tmp_path, f"[...data.smoothed(data.unpack({curve([4, math.nan, 2, 1])}), 'loss', 0.5)]")
    assert found == pytest.approx([4, None, (2 * 2 + 4) / 3, (4 * 1 + 2 * 2 + 4) / 7])


@pytest.mark.parametrize("band", ["min_max", "std", "std_error", "median", "none"])
def test_a_group_has_the_middle_and_the_chosen_band(tmp_path: Path, band: str) -> None:
    values = [[4.0, 3.0, 2.0, 1.0], [5.0, 3.5, 2.0, 0.5], [9.0, 8.0, 7.0, 6.0]]
    curves = ", ".join(f"{{ xs: {STEPS}, ys: {one} }}" for one in values)
    made = f"Object.entries(data.together([{curves}], '{band}'))"
    found = ran(tmp_path, f"Object.fromEntries({made}.map(([name, column]) => [name, [...column]]))")
    for at, first in ((0, [4.0, 5.0, 9.0]), (-1, [1.0, 0.5, 6.0])):
        mean, spread = statistics.mean(first), statistics.stdev(first)
        middle, low, high = {
            "min_max": (mean, min(first), max(first)),
            "std": (mean, mean - spread, mean + spread),
            "std_error": (mean, mean - spread / math.sqrt(3), mean + spread / math.sqrt(3)),
            "median": [statistics.quantiles(first, method="inclusive")[at] for at in (1, 0, 2)],
            "none": (mean, mean, mean),
        }[band]
        expected = pytest.approx([middle, low, high], rel=1e-6)
        assert [found[name][at] for name in ("ys", "least", "most")] == expected


def test_the_band_of_one_job_is_its_curve(tmp_path: Path) -> None:
    script = f"[...data.together([{{ xs: {STEPS}, ys: [4, 3, 2, 1] }}], 'std').most].at(-1)"
    assert ran(tmp_path, script) == 1


@pytest.mark.parametrize(("log", "trimmed"), [(False, False), (False, True), (True, True)])
def test_an_axis_without_outliers_spans_the_middle_of_the_values(tmp_path: Path, log: bool, trimmed: bool) -> None:
    values = [1.0 + at / 100 for at in range(199)] + [1e6]
    line = f"{{ xs: new Float64Array({list(range(200))}), ys: new Float32Array({values}) }}"
    view = ran(
        tmp_path,
        f"lines.viewOf([{line}], {{ logX: false, logY: {json.dumps(log)}, isTrimmed: {json.dumps(trimmed)} }})",
    )
    low, high = (10 ** view[name] if log else view[name] for name in ("y0", "y1"))
    assert low < 1.02 and (high < 3.2) == trimmed and high > 2.9
