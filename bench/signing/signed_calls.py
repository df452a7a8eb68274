"""What signatures of the control plane's calls cost: signing and verifying a pull and a directive, their sizes, and the
import of the library.

    python bench/signing/signed_calls.py [--calls 2000]

One process, no Ray. Each figure is the median of single calls.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.desired import Desired
from shoal_service.signing.calls import CallName, PullArguments
from shoal_service.signing.gate import Gate
from shoal_service.signing.signer import Signer, new_seed
from shoal_service.supervisor.config import Directive
from shoal_workers.contract.spec import ElasticitySpec

_IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
_LIBRARY = "cryptography.hazmat.primitives.asymmetric.ed25519"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    num_calls: int = parser.parse_args().calls
    signer = Signer(new_seed(), "job-bench", 1, 1)
    gate = Gate(signer.public_key, "job-bench", 1)
    pull = {"after": 12_345, "wait_s": 1.0}
    for name, call, kind, make in (
        ("pull", CallName.PULL, PullArguments, lambda: pull),
        ("directive", CallName.DIRECT, Directive, lambda: directive(0)),
        ("directive, 50 avoided nodes", CallName.DIRECT, Directive, lambda: directive(50)),
    ):
        signed = signer.sign(call, make())
        sign_us = median_us(num_calls, lambda: signer.sign(call, make()))  # noqa: B023
        open_us = median_us(num_calls, lambda: gate.opened(signed, call, kind))  # noqa: B023
        size = len(signed.text) + len(signed.signature)
        print(f"{name}: control plane {sign_us:.0f} us, supervisor {open_us:.0f} us, {size} bytes")
    times = [
        float(subprocess.run([sys.executable, "-c", _IMPORT.format(_LIBRARY)], capture_output=True).stdout)
        for _ in range(5)
    ]
    print(f"import of the library: {statistics.median(times) * 1e3:.0f} ms")


def directive(num_avoided: int) -> dict[str, Any]:
    """As the control plane makes it for each call, with its validated model turned into JSON values."""
    return Directive(
        epoch=1,
        number=1,
        granted=8,
        desired=Desired.RUN,
        elasticity=ElasticitySpec(min_workers=1, max_workers=64),
        parallelism="auto",
        spec_version=3,
        avoid=tuple(AvoidedNode(node_id=f"{n:056x}", reason="drain requested") for n in range(num_avoided)),
    ).model_dump(mode="json")


def median_us(num_calls: int, call: Callable[[], Any]) -> float:
    times = []
    for _ in range(num_calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
