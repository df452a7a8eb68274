"""AutoscalingCluster: a Ray head without CPUs, and Ray's autoscaler with its fake provider of nodes, on this machine.

The fake provider starts a raylet on this host for each node that the autoscaler wants, as a cloud would start a
machine. `ray.cluster_utils.AutoscalingCluster` wraps the same provider, but it runs `ray stop --force`, which ends
every Ray cluster of the machine, and needs a file that Ray's wheels leave out; so it is configured here as an external
provider. All processes are in one session, which `stop` ends.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.processes.os_processes import end_session
from shoal_service.cluster.connects import find_free_port
from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT

_HEAD_TYPE = "ray.head.default"
_HEAD_ID = "f" * 51 + "00000"
"""By which the fake provider knows the head."""
_NO_COMMANDS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"),
)
"""Keys that the autoscaler reads without a default."""
_START_TIMEOUT_S = 120.0


class AutoscalingCluster:
    """`start` it, and join it with `--ray-address=ADDRESS` and `environment`."""

    def __init__(self, directory: Path, *, node_cpus: int, max_nodes: int, idle_s: float, zones: Sequence[str]) -> None:
        """
        Args:
            directory: for its log, its token and the configuration of the autoscaler.
            node_cpus: of each node that the autoscaler starts.
            idle_s: a node that nobody needs is released after this time.
            zones: there is a type of node for each, with the label `zone`.
        """
        self.address = f"127.0.0.1:{find_free_port()}"
        self._directory = directory
        self._config = {
            "cluster_name": "fake",
            "max_workers": max_nodes,
            "idle_timeout_minutes": idle_s / 60,
            "provider": {
                "type": "external",
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "launch_multiple": True,
                "head_node_id": _HEAD_ID,
                "gcs_address": self.address,
            },
            "available_node_types": {
                _HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                **{zone: self._node_type(zone, node_cpus, max_nodes) for zone in zones},
            },
            "head_node_type": _HEAD_TYPE,
            "file_mounts": {},
            **{name: [] for name in _NO_COMMANDS},
        }
        self._temp_dir = ""
        self._session: int | None = None

    @staticmethod
    def _node_type(zone: str, cpus: int, most: int) -> dict[str, Any]:
        resources = {"CPU": cpus, "object_store_memory": 104_857_600}
        return {"resources": resources, "labels": {"zone": zone}, "node_config": {}, "max_workers": most}

    @property
    def environment(self) -> dict[str, str]:
        """What a driver of the cluster has in its environment before it imports ray."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._directory / "ray-token"),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            **CLUSTER_ENVIRONMENT,
        }

    def start(self, python: Path = Path(sys.executable)) -> None:
        """Returns once the head is up; `python`: its interpreter, and that of its nodes and workers."""
        token = self._directory / "ray-token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        config = self._directory / "autoscaler.json"
        config.write_text(json.dumps(self._config))
        self._temp_dir = tempfile.mkdtemp(prefix="shoal-ray-")  # a short path: Ray puts Unix sockets below it
        command = [
            *(str(python), "-m", "ray.scripts.scripts", "start", "--head", f"--port={self.address.rpartition(':')[2]}"),
            *("--num-cpus=0", f"--autoscaling-config={config}", f"--temp-dir={self._temp_dir}"),
            *(
                f"--ray-client-server-port={find_free_port()}",
                "--include-dashboard=false",
                "--include-log-monitor=false",
            ),
            *("--object-store-memory=104857600", "--dashboard-agent-listen-port=0", "--disable-usage-stats"),
        ]
        environment = {
            **self.environment,
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "OMP_NUM_THREADS": "1",
        }
        log_path = self._directory / "head.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self._session = process.pid
        if process.wait(_START_TIMEOUT_S) != 0:
            raise RuntimeError(f"the head did not start:\n{log_path.read_text(errors='replace')[-2000:]}")

    def autoscaler_log(self) -> str:
        """For the message of a test that fails."""
        paths = sorted(Path(self._temp_dir).glob("session_2*/logs/monitor.*"))
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in paths)

    def stop(self) -> None:
        """Ends the head, the autoscaler and all nodes."""
        if self._session is not None:
            end_session(self._session)
        shutil.rmtree(self._temp_dir, ignore_errors=True)
