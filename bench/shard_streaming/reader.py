"""One process that trains on streamed shards, as far as its data is concerned: each step reads a batch and then waits
as long as an accelerator would compute. Started by `main` with its settings as JSON; prints what it measured as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from shoal_workers.data.streaming import FixedRecords, StreamedShards

_SEED = 3


def main() -> None:
    settings = json.loads(sys.argv[1])
    before_mib, start, cpu_start = _resident_mib(), time.perf_counter(), time.process_time()
    kind = FixedRecords(settings["record_bytes"]) if settings["format"] == "raw" else None
    data = StreamedShards(settings["shards"], kind, **settings["arguments"])
    waits = []
    first_s = first_cpu_s = 0.0
    for step in range(settings["steps"]):
        began = time.perf_counter()
        _read(data, settings["position"] + step * settings["batch_size"], settings["batch_size"])
        waits.append(time.perf_counter() - began)
        if not step:
            first_s, first_cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        time.sleep(settings["step_s"])
    found = {
        "first_s": first_s,
        "first_cpu_s": first_cpu_s,
        "waits_s": waits,
        "grown_mib": _resident_mib() - before_mib,
    }
    found["blocks"] = settings["steps"] * settings["batch_size"] / settings["block_samples"]
    data.close()
    cache = Path(settings["arguments"]["cache_dir"])
    found["cache_bytes"] = sum(path.stat().st_size for path in cache.iterdir())
    print(json.dumps(found))


def _read(data: StreamedShards, position: int, batch_size: int) -> Any:
    indices = data.samples_at(range(position, position + batch_size), _SEED)
    batch = data.__getitems__(indices)
    if isinstance(batch[0], bytes):
        assert [int.from_bytes(record[:8], "little") for record in batch] == indices
    else:
        assert [sample["number"] for sample in batch] == indices
    return batch


def _resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
