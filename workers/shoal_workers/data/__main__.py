"""`python -m shoal_workers.data SPEC.json [--json]`: prepare the token shards of a job spec, ahead of the job.

A separate program, so that the command line (`shoal data prepare`) does not import torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from shoal_workers.contract.model.lm import TextDataConfig
from shoal_workers.data.bar import prepare_with_bar
from shoal_workers.data.errors import DataError


def main() -> int:
    """Exit status 1 if the text cannot be read; the bar and errors go to standard error."""
    parser = argparse.ArgumentParser(prog="python -m shoal_workers.data", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("spec", help='job spec, JSON; "-": standard input')
    parser.add_argument("--json", action="store_true", help="one line of JSON about the result on standard output")
    arguments = parser.parse_args()
    text = sys.stdin.read() if arguments.spec == "-" else Path(arguments.spec).read_text()
    config = TextDataConfig.model_validate(json.loads(text).get("data", {}))
    try:
        corpus = prepare_with_bar(config)
    except DataError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if arguments.json:
        result = {"directory": str(corpus.directory), "content_hash": corpus.index.content_hash}
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
