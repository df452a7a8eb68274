"""A worker of one rank that runs a script until somebody kills something: `script_worker.py FILE`.

Prints the pid of its guardian, then how the script has ended.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.script.runner import ScriptRunner


def main() -> None:
    runner = ScriptRunner(
        JobSpec.model_validate({"script": {"file": sys.argv[1]}}),
        checkpoint_root=str(Path.cwd() / "checkpoints"),
        outbox=Outbox(),
        store=StoreServer("127.0.0.1", "key"),
        node_id="node",
    )
    runner.prepare()
    print(runner.guardian_pid, flush=True)
    end = runner.run(
        Assignment(
            job_id="job",
            attempt=1,
            generation=1,
            rank=0,
            layout=Layout(dp_replicate=1),
            store_host="127.0.0.1",
            store_port=runner.store_port,
            restore_from=None,
        )
    )
    print(end.kind, flush=True)


main()
