"""The pause of an update of the code: seconds from the last step with the old code until the new group has formed.

    python bench/hot_update.py [--updates 5] [--workers 2]

One job on an embedded cluster gets the same task again and again, each time with another comment. The last line is
JSON: every pause, and the greatest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.append(str(Path(__file__).parents[1] / "tools"))
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from kit.worlds.tiny_jobs import TASKS, submit_tiny
from shoal_server import serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    pauses = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "gate").mkdir()
        with serving(base / "state", num_cpus=options.workers) as server, server.client as client:
            settings = {"workers": options.workers, "steps": 100_000, "step_s": 0.1}
            run = submit_tiny(client, base / "gate", dict, **settings)
            run.wait_for_step(10)
            for number in range(1, options.updates + 1):
                code = base / f"code-{number}"
                code.mkdir()
                (code / "tiny.py").write_text(f"{(TASKS / 'tiny.py').read_text('utf-8')}# {number}\n", "utf-8")
                client.update_code(run.id, code)
                pauses.append(round(run.wait_for_event("code.updated", number).data["pause_s"], 3))
                print(f"update {number}: {pauses[-1]:.3f} s", flush=True)
            client.cancel(run.id)
            client.wait(run.id, timeout_s=60)
    print(json.dumps({"pause_s": pauses, "greatest_s": max(pauses)}))


if __name__ == "__main__":
    main()
