"""Tries tasks in one process, as `shoal check` does. argv: JSON list of [task, keys of the spec that differ].

Writes one line of JSON: for each task its report, or what was found.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal_workers.check import TaskRefused, check
from shoal_workers.contract.checks.spec_errors import parse_spec

SPEC: dict[str, Any] = {
    "stop": {"steps": 9},
    "batch": {"global_size": 8, "micro_size": 4},
    "validation": {"samples": 4},
    "parallelism": {"shard": "full"},  # a sharded model refuses more than a plain one
}


def tried(task: str, changed: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        try:
            return asdict(check(parse_spec({**SPEC, **changed, "task": task}), Path(directory), lambda *_: None))
        except TaskRefused as refused:
            return {"kind": refused.kind, "sentence": refused.report.sentence, **refused.report.model_dump(mode="json")}


if __name__ == "__main__":
    lines, sys.stdout = sys.stdout, sys.stderr
    answers = [tried(task, changed) for task, changed in json.loads(sys.argv[1])]
    lines.write(json.dumps(answers) + "\n")
