"""Proves layouts of some tasks of kit/tasks. argv: a file as `ranks` has it, and JSON list of [spec, layouts or null].

Its answer: for each task, by layout in words, what was found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ranks import write_answer

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout
from shoal_workers.proofs import layouts_to_prove, prove_layouts

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
    answers = []
    for document, wanted in json.loads(sys.argv[2]):
        spec = parse_spec(document)
        layouts = layouts_to_prove(spec) if wanted is None else [Layout(**one) for one in wanted]
        answers.append({one.layout.describe(): one.model_dump(mode="json") for one in prove_layouts(spec, layouts)})
    write_answer(sys.argv[1], answers)
