"""Metrics hooks that write all their calls to the file RECORD names: one JSON document a line."""

import json
import os
import sys
import time
from pathlib import Path


class Recording:
    """Says at its start which step each metric has reached, as a tracker does."""

    def __init__(self):
        self.file = Path(os.environ["RECORD"])

    def start(self, job):
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        logged = [entry["log"] for line in lines if "log" in (entry := json.loads(line))]
        self._write({"start": job.id, "pid": os.getpid()})
        return {name: max(step for step, names in logged if name in names) for _, names in logged for name in names}

    def log(self, step, values, at):
        print(f"step {step} with {os.environ.get('TRACKER_KEY', 'no key')}")
        self._write({"log": [step, sorted(values)]})

    def end(self, state):
        self._write({"end": state})

    def _write(self, entry):
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")


class FailsOnce(Recording):
    """Raises in the middle of the first batch with step 3."""

    def log(self, step, values, at):
        flag = self.file.with_suffix(".failed")
        if step == 3 and not flag.exists():
            flag.touch()
            raise ConnectionError(f"the tracker refuses {os.environ.get('TRACKER_KEY', 'no key')}")
        super().log(step, values, at)


class Hangs(Recording):
    def log(self, step, values, at):
        time.sleep(600)


class Leaves(Recording):
    def start(self, job):
        sys.exit(7)
