"""Views of a job and orders to its workers that have a value in each field; keywords give other ones."""

from typing import Any

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.views import IncidentView, WorkerView
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import Assignment, Phase


def series_point(step: int, **values: Any) -> SeriesPoint:
    usual = {"at": float(step), "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 1.0, "step_s": 1.0}
    return SeriesPoint(**{"step": step, **usual, "world_size": 2, "generation": 1, **values})


def incident_view(number: int = 1, **values: Any) -> IncidentView:
    usual = {"cause": IncidentCause.WORKER_DIED, "witness": "ray", "ranks": (1,), "worker_ids": ("w-1",)}
    return IncidentView(**{"id": number, **usual, "generation": 1, "at": 1.0, "from_workers": 4, **values})


def worker_view(rank: int = 0, **values: Any) -> WorkerView:
    usual = {"worker_id": f"w-{rank}", "state": "training", "node_id": "n1", "node_ip": "127.0.0.1", "pid": 1}
    return WorkerView(**{"rank": rank, **usual, "generation": 1, "phase": Phase.FORWARD, "step": 1, **values})


def assignment(**values: Any) -> Assignment:
    usual = {"job_id": "job", "attempt": 1, "generation": 1, "rank": 0, "layout": fully_sharded(1)}
    return Assignment(**{**usual, "store_host": "127.0.0.1", "store_port": 1, "restore_from": None, **values})
