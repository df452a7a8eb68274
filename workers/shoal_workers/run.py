"""Trains a job spec on one machine without Ray: `torchrun --nproc-per-node N -m shoal_workers.run spec.yaml`.

It runs the same engine as the service does, with the same settings of libraries; use it to debug, profile and measure.
This is the command line; standalone.py trains.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import yaml

from shoal_workers.contract import JobSpec
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.json_values import YAML_NUMBERS
from shoal_workers.libc_tunables import choose_tunables


def main() -> int:
    """Exit status 0 if the last step was reached."""
    arguments = _arguments()
    spec = _read_spec(arguments.spec)
    if spec.script is not None:
        raise SystemExit(
            f"{arguments.spec} has a script, {spec.script.words}: run it by torchrun, or by `shoal submit`."
        )
    added = {} if spec.worker.gpus else choose_tunables(os.environ)
    if added:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added})
    from shoal_workers.standalone import train  # imports torch, which the process that is replaced does without

    return train(spec, arguments.checkpoint_dir, changed_spec=arguments.changed_spec)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal_workers.run", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("spec", type=Path, help="job spec, YAML or JSON")
    parser.add_argument(
        "--checkpoint-dir",
        help="directory or URL of this run's checkpoints (default: checkpoint.url, else ./NAME-checkpoints)",
    )
    parser.add_argument("--changed-spec", action="store_true", help="continue from those of another spec or data")
    return parser.parse_args()


class _SpecLoader(yaml.SafeLoader):
    """Has the numbers that the service reads."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in PyYAML
        first: [(tag, YAML_NUMBERS.get(tag, pattern)) for tag, pattern in resolvers]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _read_spec(path: Path) -> JobSpec:
    try:
        return parse_spec(yaml.load(path.read_text(), _SpecLoader))
    except SpecError as error:
        raise SystemExit(f"{path} cannot be used:\n{error}") from None


if __name__ == "__main__":
    sys.exit(main())
