"""A script that goes on from its file in the working directory: `resumes.py GATE`."""

import sys
import time
from pathlib import Path

last = Path("out", "last.txt")
step = int(last.read_text()) if last.exists() else 0
print(f"goes on from step {step}", flush=True)
while step < 40 and not (step == 20 and not Path(sys.argv[1]).exists()):
    step += 1
    last.parent.mkdir(exist_ok=True)
    last.write_text(str(step))
print(f"has reached step {step}", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
