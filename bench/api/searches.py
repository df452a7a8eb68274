"""What the search over everything asks for, with 10,000 jobs: jobs by words, and jobs by words of their notes.

Most jobs have ended, and some train. A word that one job has is the slowest search: all jobs are looked at. A word that
all jobs have finds a page at once.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from api.reads import Attempt, Edge, fetch, http_edge, point, times
from shoal_service.core.desired import Desired
from shoal_service.store import Store, submissions
from shoal_workers.contract.checks.spec_errors import parse_spec

NUM_JOBS, NUM_TRAINING = 10_000, 200
_REQUESTS, _AT_ONCE = 20, 1_000
_POINTS = 300
_RARE, _COMMON = "zebra", "rate"
_NOTES = "## Why\n\nThe {word} {number} tries a rate of its own. " + "What was seen, and what to try next. " * 10


def measure(folder: Path) -> dict[str, Any]:
    """Times each request from a new connection to the end of its answer, as the page's scripts send it."""
    url = f"sqlite:///{folder}/shoal.db"
    store = Store.open(url)
    _fill(store)
    found: dict[str, Any] = {}
    with http_edge(store, url) as edge:
        for word, name in ((_RARE, "rare"), (_COMMON, "common")):
            paths = {
                "jobs": f"/v1/overview?limit=20&jobs_only=true&search={word}",
                "notes": f"/v1/jobs?limit=8&where={quote(f'annotation.notes ~ {json.dumps(word)}')}",
            }
            for source, path in paths.items():
                num_found = len(json.loads(fetch(edge, path))["items"])
                assert num_found == (1 if name == "rare" else {"jobs": 20, "notes": 8}[source]), (path, num_found)
                found |= times(f"search_{source}_{name}", [_seconds(edge, path) for _ in range(_REQUESTS)])
    store.close()
    for source in ("jobs", "notes"):
        rare, common = f"search_{source}_rare", f"search_{source}_common"
        print(
            f"search of {source}, {NUM_JOBS:,} jobs: a word of one job p50 {found[f'{rare}_p50_ms']} ms, worst "
            f"{found[f'{rare}_max_ms']} ms; of all p50 {found[f'{common}_p50_ms']} ms, worst "
            f"{found[f'{common}_max_ms']} ms"
        )
    return found


def _fill(store: Store) -> None:
    document = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1000}, "labels": {"team": "speech", "seed": "1"}}
    spec = parse_spec({**document, "name": "lm"})
    now = time.time()
    for begin in range(0, NUM_JOBS - NUM_TRAINING, _AT_ONCE):
        with store.write() as tx:
            for number in range(begin, min(begin + _AT_ONCE, NUM_JOBS - NUM_TRAINING)):
                word = _RARE if number == 0 else "run"
                changes = {
                    "name": f"{word}-rate-{number}",
                    "annotations": {"notes": _NOTES.format(word=word, number=number)},
                }
                job, _ = submissions.create(tx, spec.model_copy(update=changes), idempotency_key=None, now=now + number)
                submissions.request(tx, job.id, Desired.CANCEL, now=now + number)
    for number in range(NUM_TRAINING):
        notes = _NOTES.format(word="run", number=number)
        attempt = Attempt(store, f"trains-rate-{number}", labels=document["labels"], annotations={"notes": notes})
        attempt.report(step=_POINTS, series=tuple(point(step) for step in range(1, _POINTS + 1)))


def _seconds(edge: Edge, path: str) -> float:
    begun_mono = time.monotonic()
    fetch(edge, path)
    return time.monotonic() - begun_mono
