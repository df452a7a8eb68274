"""What a recovery costs at any world size: numbers with their sources, and the formulas between them. Pure.

    measured      here, by the bench that is named
    published     by others, on hardware that is not here
    assumed       neither; the twin's tables show how much depends on it

Beyond the sizes that were measured or published, every formula below is an extrapolation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCosts:
    """Seconds, bytes and bytes per second."""

    death_s: float = 0.1
    """A worker's death until the supervisor knows it. Measured: docs/recovery.md, SIGKILL of a worker, noticed."""
    silent_node_s: float = 1.64
    """A node's loss until its silence is reported. Measured: docs/recovery.md, network of a host cut, noticed."""
    raised_s: float = 0.1
    """A GPU's fault until the exception of its rank is known. Assumed: as a death."""
    supervisor_4096_s: float = 1.06
    """A kill among 4,096 workers until the last one has its next `run`. Measured: docs/measured/scale.md."""
    supervisor_exponent: float = 1.09
    """Growth of `supervisor_4096_s` with the workers, measured from 64 to 4,096."""
    order_s: float = 0.0003
    """Time of the supervisor's thread for an order through Ray, with its answer. Measured: bench/scale/orders.py, 1,024
    ranks. The workers of `supervisor_4096_s` are in the supervisor's process, so it is not part of that."""
    leave_s: float = 0.05
    """A rank's interrupt until it has left. Measured: docs/recovery.md, quiesce, with gloo on CPU."""
    connect_96k_s: float = 265.0
    """NCCL's initialization of a communicator of 96,000 GPUs. Published: arXiv 2510.20171 (NCCLX, which needs 1/11)."""
    build_s: float = 0.18
    """A survivor's restore without the bytes. Measured: docs/recovery.md, restore, 4 ranks on CPU."""
    host_bandwidth: float = 55e9
    """Host to GPU, of each GPU. Measured: docs/measured/gpu.md."""
    node_bandwidth: float = 25e9
    """From a buddy's memory, for a GPU. Assumed: half of a 400 Gbit/s link for each GPU."""
    storage_bandwidth: float = 2e12
    """All readers of a checkpoint together. Published: arXiv 2407.21783, 2 TB/s sustained at 16,384 GPUs."""
    storage_s: float = 1.0
    """A search for the newest checkpoint, or a commit. Assumed."""
    first_step_s: float = 0.28
    """The first step of a group beyond a median one. Measured: docs/recovery.md, a lost raylet, on CPU."""
    start_s: float = 60.0
    """A worker's start until it is warm, on a node that is there. Assumed: a fork, imports and a CUDA context."""
    state_bytes: float = 16.0
    """Bytes of a parameter in a snapshot: fp32 weights and Adam's moments, bf16 weights, as the planner counts."""

    def find_leave_s(self, gpus: int) -> float:
        """Return the seconds until the last rank of a lost group has left: half of the supervisor's work, then it."""
        return self._supervisor_s(gpus) / 2 + self.order_s * gpus + self.leave_s

    def find_form_s(self, gpus: int, axis_ranks: int) -> float:
        """Return the seconds from the decision until all ranks are connected: the other half, and NCCL.

        A rank connects to `axis_ranks` ranks: those along each axis of the mesh, one axis after the other; see
        engine/group/all_ranks.py. A communicator takes time in proportion to its ranks.
        """
        return self._supervisor_s(gpus) / 2 + self.order_s * gpus + self.connect_96k_s * axis_ranks / 96_000

    def find_restore_s(self, gpus: int, params: float, *, is_durable: bool) -> float:
        """Return the seconds to restore the state: a lost node's part comes from its buddy, or all from storage."""
        rank_bytes = self.state_bytes * params / gpus
        remote_s = gpus * rank_bytes / self.storage_bandwidth if is_durable else rank_bytes / self.node_bandwidth
        return self.build_s + remote_s + rank_bytes / self.host_bandwidth

    def find_snapshot_pace(self, gpus: int, params: float, step_s: float, budget: float) -> tuple[int, int, float]:
        """Return the steps between two copies, between two sends to the buddy, and the share of the time for both.

        As `SnapshotPace` of engine/state/snapshots.py: copies get up to four fifths of the budget, sends the rest. A
        send counts as if training waited for all of it.
        """
        rank_bytes = self.state_bytes * params / gpus
        copy_s, send_s = rank_bytes / self.host_bandwidth, rank_bytes / self.node_bandwidth
        copies = max(1, math.ceil(copy_s / (0.8 * budget * step_s)))
        copy_share = copy_s / (copies * step_s)
        send_budget = max(0.2 * budget, budget - copy_share)
        sends = copies * max(1, math.ceil(send_s / (send_budget * step_s * copies)))
        return copies, sends, copy_share + send_s / (sends * step_s)

    def _supervisor_s(self, gpus: int) -> float:
        return float(self.supervisor_4096_s * (gpus / 4096) ** self.supervisor_exponent)
