"""The section System of the page of a job: the heat map and the curves of its ranks."""

from __future__ import annotations

from typing import Any

from kit.processes.chromium import Browser
from kit.worlds.written_service import AT, RUNNING, Service
from shoal_service.core.system_metrics import SystemSample

STRAGGLER = 2
_MAP = "document.getElementById('system-map').data[0]"


def values(number: int) -> dict[str, Any]:
    return {
        "busy": tuple(0.95 if rank == STRAGGLER else 0.4 for rank in range(4)),
        "memory_bytes": tuple(float((1 + rank) << 30) for rank in range(4)),
        "communication": tuple(0.05 if rank == STRAGGLER else 0.6 for rank in range(4)),
    }


def test_the_straggler_is_the_darkest_row_and_another_metric_is_chosen(reader: Browser, written: Service) -> None:
    job = written.add_job(name="system")
    written.begin(job)
    samples = tuple(SystemSample(at=AT + 10 * number, generation=1, values=values(number)) for number in range(30))
    written.report(job, RUNNING, system=samples)
    reader.open(f"{written.url}/jobs/{job.id}#tab=system")
    reader.sees("#system-said", f"Highest: rank {STRAGGLER} with 95 %")
    rows = reader.run(f"{_MAP}.z.map((row) => row.reduce((sum, one) => sum + one, 0) / row.length)")
    assert rows.index(max(rows)) == STRAGGLER and len(rows) == 4
    assert reader.run(f"[{_MAP}.zmin, {_MAP}.zmax]") == [0, 1]
    assert reader.run("document.querySelectorAll('#system-map .heatmaplayer image').length") == 1
    assert reader.run("document.querySelectorAll('#system-lines .scatterlayer .trace').length") == 4
    span = "document.getElementById('{}')._fullLayout.xaxis.range"
    assert reader.run(span.format("system-map")) == reader.run(span.format("system-lines"))

    choose = (
        "(() => {{ const one = document.getElementById('{}'); one.value = '{}';"
        " one.dispatchEvent(new Event('change')); }})()"
    )
    reader.run(choose.format("system-metric", "memory_bytes"))
    reader.sees("#system-said", "Highest: rank 3 with 4 GiB")
    reader.run(choose.format("system-ranks", "0-1"))
    reader.sees("#system-said", "Highest: rank 1 with 2 GiB; lowest: rank 0 with 1 GiB")
    reader.run(choose.format("system-ranks", "zero"))
    reader.sees("#system-said", "0,4-7")
    assert [one for one in reader.complaints() if "422" not in one] == []
