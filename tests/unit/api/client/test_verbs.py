"""Every operation of the REST API has a method of the Python client, and every method an operation."""

import inspect
import json
from pathlib import Path

from shoal_api.client import Client

OPENAPI = Path(__file__).resolve().parents[4] / "docs" / "reference" / "openapi.json"
METHODS = {
    "POST /v1/jobs": "submit",
    "POST /v1/jobs/dry-run": "dry_run",
    "GET /v1/jobs": "jobs_page",
    "GET /v1/jobs/{job_id}": "job",
    "PATCH /v1/jobs/{job_id}": "patch",
    "DELETE /v1/jobs/{job_id}": "delete_job",
    "GET /v1/deletions": "deletions",
    "POST /v1/gc": "gc",
    "POST /v1/jobs/{job_id}/cancel": "cancel",
    "POST /v1/jobs/{job_id}/pause": "pause",
    "POST /v1/jobs/{job_id}/resume": "resume",
    "POST /v1/jobs/{job_id}/extend": "extend",
    "POST /v1/jobs/{job_id}/retry": "retry",
    "POST /v1/jobs/{job_id}/move": "move",
    "GET /v1/jobs/{job_id}/events": "events_page",
    "GET /v1/jobs/{job_id}/logs": "logs",
    "GET /v1/jobs/{job_id}/series": "series",
    "GET /v1/jobs/{job_id}/overview": "overview",
    "GET /v1/jobs/{job_id}/specs": "spec_versions",
    "GET /v1/timeline": "timeline",
    "POST /v1/sweeps": "submit_sweep",
    "GET /v1/sweeps": "sweeps",
    "GET /v1/sweeps/{project}/{name}": "sweep",
    "GET /v1/sweeps/{project}/{name}/curves": "sweep_curves",
    "POST /v1/sweeps/{project}/{name}/cancel": "cancel_sweep",
    "GET /v1/overview": "overview_of_all",
    "GET /v1/jobs/{job_id}/workers": "workers",
    "GET /v1/jobs/{job_id}/stacks": "stacks",
    "POST /v1/jobs/{job_id}/profiles": "request_profile",
    "GET /v1/jobs/{job_id}/profiles": "profiles",
    "GET /v1/jobs/{job_id}/profiles/{number}": "profile",
    "GET /v1/jobs/{job_id}/profiles/{number}/files/{name}": "save_profile_file",
    "GET /v1/jobs/{job_id}/incidents": "incidents",
    "GET /v1/jobs/{job_id}/checkpoints": "checkpoints",
    "POST /v1/jobs/{job_id}/checkpoints/{name}/verify": "verify_checkpoint",
    "DELETE /v1/jobs/{job_id}/checkpoints/{name}": "delete_checkpoint",
    "PUT /v1/jobs/{job_id}/checkpoints/{name}/pin": "pin_checkpoint",
    "DELETE /v1/jobs/{job_id}/checkpoints/{name}/pin": "unpin_checkpoint",
    "POST /v1/jobs/{job_id}/take": "take",
    "GET /v1/jobs/{job_id}/parity": "parity",
    "GET /v1/jobs/{job_id}/lineage": "lineage",
    "GET /v1/jobs/{job_id}/files": "files",
    "GET /v1/jobs/{job_id}/files/{name}": "save_file",
    "GET /v1/jobs/{job_id}/media": "media",
    "GET /v1/jobs/{job_id}/media/{file}": "media_file",
    "GET /v1/jobs/{job_id}/system": "system",
    "POST /v1/jobs/{job_id}/archive": "archive",
    "POST /v1/jobs/{job_id}/unarchive": "unarchive",
    "GET /v1/curves": "curves",
    "GET /v1/job-fields": "job_fields",
    "GET /v1/job-export": "export_jobs",
    "GET /v1/views": "views",
    "PUT /v1/views/{project}/{view}": "save_view",
    "DELETE /v1/views/{project}/{view}": "delete_view",
    "GET /v1/models": "models",
    "GET /v1/models/{project}/{name}/{which}": "model",
    "POST /v1/models/{name}/versions": "register_model",
    "DELETE /v1/models/{project}/{name}/versions/{version}": "remove_model",
    "PUT /v1/models/{project}/{name}/aliases/{alias}": "set_model_alias",
    "DELETE /v1/models/{project}/{name}/aliases/{alias}": "remove_model_alias",
    "POST /v1/plans": "plan",
    "POST /v1/specs/validate": "validate",
    "PUT /v1/code/{sha256}": "upload_code",
    "GET /v1/cluster": "cluster",
    "GET /v1/nodes": "nodes",
    "GET /v1/nodes/{node_id}": "node",
    "POST /v1/nodes/{node_id}/drain": "drain",
    "DELETE /v1/nodes/{node_id}/drain": "undo_drain",
    "POST /v1/nodes/{node_id}/cordon": "cordon",
    "DELETE /v1/nodes/{node_id}/cordon": "undo_cordon",
    "POST /v1/nodes/{node}/preemption-notice": "announce_preemption",
    "GET /v1/webhooks": "webhooks",
    "GET /v1/queue": "queue",
    "GET /v1/projects": "projects",
    "GET /v1/projects/{name}": "project",
    "PUT /v1/projects/{name}": "set_project",
    "DELETE /v1/projects/{name}": "delete_project",
    "GET /v1/users": "users",
    "GET /v1/users/{name}": "user",
    "PUT /v1/users/{name}": "set_user",
    "DELETE /v1/users/{name}": "delete_user",
    "GET /v1/whoami": "whoami",
    "POST /v1/session/link": "session_link",
    "POST /v1/tokens": "create_token",
    "POST /v1/clusters/{cluster}/tokens": "create_cluster_token",
    "GET /v1/clusters": "clusters",
    "GET /v1/clusters/{cluster}": "joined_cluster",
    "PATCH /v1/clusters/{cluster}": "label_cluster",
    "DELETE /v1/clusters/{cluster}": "remove_cluster",
    "POST /v1/clusters/{cluster}/cordon": "cordon_cluster",
    "DELETE /v1/clusters/{cluster}/cordon": "uncordon_cluster",
    "GET /v1/clusters/{cluster}/tokens": "cluster_tokens",
    "GET /v1/tokens": "tokens",
    "DELETE /v1/tokens/{token_id}": "revoke_token",
    "GET /v1/audit": "audit",
    "GET /healthz": "health",
    "GET /readyz": "ready",
    "GET /metrics": "metrics",
}
WITHOUT_METHOD = {
    *("GET /problems", "GET /problems/{code}", "GET /v1/spec-schema"),
    *("POST /v1/session", "DELETE /v1/session"),
    *("POST /v1/clusters/{cluster}/reports", "GET /v1/clusters/{cluster}/orders"),
    "GET /v1/clusters/{cluster}/archives/{sha256}",
    *("POST /v1/jobs/{job_id}/attempts/{attempt}/reports", "GET /v1/jobs/{job_id}/attempts/{attempt}/directive"),
}
"""Documentation, and what only browsers, gateways and supervisors need."""
COMBINED = {
    "jobs",
    "save_series",
    "events",
    "wait",
    "scale",
    "update_code",
    "change_weights",
    "follow_model",
    "close",
    "base_url",
}
"""Methods that call other methods, or send no request."""


def test_every_operation_has_a_method() -> None:
    paths = json.loads(OPENAPI.read_text(encoding="utf-8"))["paths"]
    operations = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert operations - WITHOUT_METHOD == set(METHODS)


def test_every_method_has_an_operation() -> None:
    public = {name for name, _ in inspect.getmembers(Client) if not name.startswith("_")}
    assert public - COMBINED == set(METHODS.values())
