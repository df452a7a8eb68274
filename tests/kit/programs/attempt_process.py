"""Program of a process that joins an attempt, writes parts, prints its directory, and waits until it is killed.

python attempt_process.py ROOT JOB NODE [GENERATION:STEP ...]      a step of `torn` is never finished
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal_workers.snapshot_store.slots.registry import SlotRegistry
from shoal_workers.snapshot_store.slots.slot_files import Regions, SlotFile, Stamp

REGIONS = Regions.lay_out(index_bytes=0, extra_room=0, num_bytes=100)

directory = SlotRegistry(Path(sys.argv[1]), job_id=sys.argv[2], attempt=1, memory_id=sys.argv[3], worker_id="s")
for number, part in enumerate(sys.argv[4:]):
    slot = SlotFile(directory.path / f"own-{number}", REGIONS.file_bytes)
    generation, _, step = part.partition(":")
    if step != "torn":
        slot.finish(REGIONS, Stamp(int(generation), 0, 1, int(step)), num_extra_bytes=0)
print(directory.path, flush=True)
sys.stdin.read()
