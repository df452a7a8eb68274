"""The end of the demo, on a job of a real server: collecting, comparing, checking, printing."""

import io
from typing import Any

from rich.console import Console

from shoal_api.client import Client
from shoal_api.demo.report import (
    DemoOutcome,
    find_failed_checks,
    find_world_sizes,
    read_losses,
    read_run,
    render_report,
)
from shoal_service.core.parity import compare


def test_the_outcome_of_an_ended_job_is_collected_checked_and_printed(service: Any) -> None:
    job = service.add_job()
    service.train(job)
    service.finish(job)
    with Client(service.url) as client:
        ended = client.job(job.id)
        run = read_run(client, ended)
        outcome = DemoOutcome(
            state=ended.status.state,
            steps=ended.status.step,
            world_sizes=find_world_sizes(client.events(job.id)),
            layouts=("fsdp4", "fsdp3"),
            survivors=(11, 12, 13),
            incidents=tuple(client.incidents(job.id)),
            comparison=compare(read_losses(run), read_losses(run), tolerance=1e-4),
            val_bits_per_byte=ended.status.val_bits_per_byte,
            tokens_per_s=run.tokens_per_s,
        )
    assert [point.step for point in run.series] == list(range(1, 11))
    assert outcome.world_sizes == (4, 3)
    assert outcome.comparison.max_abs_diff == 0.0
    assert run.checkpoint_url.endswith("step-10")
    broken = find_failed_checks(outcome, workers=4, tolerance=1e-4)
    assert broken == ("the world sizes were 4 -> 3; expected 4 -> 3 -> 4 among them",)
    console = Console(file=io.StringIO(), width=120)
    for part in render_report(outcome, run, run, broken, url=service.url, tolerance=1e-4):
        console.print(part)
