"""Writes the generated pages (`make docs`):

- docs/reference/spec.md lists every key of a job spec, from the schema of `JobSpec`;
- docs/reference/metrics.md lists every metric, from its declaration;
- docs/reference/events.md lists every event type, from the catalogue in core/events;
- the state diagram in docs/architecture.md is the table of transitions of the attempt machine;
- the table of causes in docs/elastic.md is the table of faults;
- the table of permissions in docs/security.md is that of the roles.

Tests compare the committed pages with what this makes, so they cannot fall behind the code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shoal_service.core.access import PERMISSIONS, ROLE_MEANINGS, Role
from shoal_service.core.attempt.faults import FAULTS, Budget
from shoal_service.core.attempt.state.parts import TRANSITIONS, Stage
from shoal_service.core.events.base import JobEvent
from shoal_service.core.events.catalogue import TOPICS
from shoal_service.core.goodput import Category
from shoal_service.telemetry.catalogue import RecoveryPhase
from shoal_service.telemetry.exposition import ALL, NODE_STATES
from shoal_service.telemetry.tallies import DeliveryOutcome
from shoal_workers.contract.base import read_field_docstrings
from shoal_workers.contract.hugging_face import DpoConfig, HuggingFaceConfig, LoraConfig
from shoal_workers.contract.job import IncidentCause, JobState
from shoal_workers.contract.language_model import LanguageModelConfig
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.text_data import SECTIONS, AnswersConfig, PreferencesConfig, TextDataConfig, TextSource

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    (DOCS / "reference" / "spec.md").write_text(spec_page(), encoding="utf-8")
    (DOCS / "reference" / "metrics.md").write_text(metrics_page(), encoding="utf-8")
    (DOCS / "reference" / "events.md").write_text(events_page(), encoding="utf-8")
    page = DOCS / "architecture.md"
    page.write_text(with_stage_diagram(page.read_text(encoding="utf-8")), encoding="utf-8")
    page = DOCS / "elastic.md"
    page.write_text(with_fault_table(page.read_text(encoding="utf-8")), encoding="utf-8")
    page = DOCS / "security.md"
    page.write_text(with_permissions(page.read_text(encoding="utf-8")), encoding="utf-8")


def with_stage_diagram(page: str) -> str:
    """docs/architecture.md with a new state diagram."""
    return _with_section(page, _DIAGRAM_BEGIN, _stage_diagram(), _DIAGRAM_END)


def with_fault_table(page: str) -> str:
    """docs/elastic.md with a new table of faults."""
    return _with_section(page, _FAULTS_BEGIN, fault_table(), _FAULTS_END)


def with_permissions(page: str) -> str:
    """docs/security.md with new tables of roles and permissions."""
    lines = ["| role | |", "|---|---|", *(f"| {role} | {meaning} |" for role, meaning in ROLE_MEANINGS.items()), ""]
    lines += [f"| permission | {' | '.join(Role)} | with projects | |", "|---" * (len(Role) + 3) + "|"]
    for permission, row in PERMISSIONS.items():
        marks = " | ".join("x" if role in row.roles else "" for role in Role)
        lines.append(f"| `{permission}` | {marks} | {'their jobs' if row.of_projects else 'no'} | {row.meaning} |")
    return _with_section(page, _PERMISSIONS_BEGIN, "\n".join(lines) + "\n\n", _PERMISSIONS_END)


def _with_section(page: str, begin: str, section: str, end: str) -> str:
    """The page with what stands between the two marks replaced; everything else is written by hand."""
    before, rest = page.split(begin)
    return f"{before}{begin}\n{section}{end}{rest.split(end)[1]}"


_DIAGRAM_BEGIN = (
    "<!-- stages: made by tools/docs_pages.py from TRANSITIONS in core/attempt/state/parts.py; run `make docs` -->"
)
_DIAGRAM_END = "<!-- end of stages -->"


_PERMISSIONS_BEGIN = "<!-- permissions: made from core/access.py by tools/docs_pages.py; run `make docs` -->\n"
_PERMISSIONS_END = "<!-- end of permissions -->"
_FAULTS_BEGIN = "<!-- faults: made by tools/docs_pages.py from FAULTS in core/attempt/faults.py; run `make docs` -->"
_FAULTS_END = "<!-- end of faults -->"


def fault_table() -> str:
    """One row per incident cause."""
    lines = [
        "| cause | in words | at fault | action | probation of the node | snapshots in memory | budget |",
        "|---|---|---|---|---|---|---|",
    ]
    for cause, f in FAULTS.items():
        budget = "none" if f.budget is Budget.NONE else ", ".join(f"`{key}`" for key in f.budget.split(", "))
        row = (f"`{cause}`", f.description, f.blames, f.action, f.probation, f.memory, budget)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _stage_diagram() -> str:
    """The state diagram. Every stage can end; those arrows are left out."""
    arrows = [
        f"    {stage} --> {after}"
        for stage in Stage
        for after in Stage
        if after in TRANSITIONS[stage] and after is not Stage.ENDED
    ]
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Stage.OPENING}", *arrows]
    return "\n".join([*lines, f"    {Stage.COMMITTING} --> {Stage.ENDED}", f"    {Stage.ENDED} --> [*]", "```", ""])


def metrics_page() -> str:
    """The whole of docs/reference/metrics.md."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in ALL:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    words = [
        f"| `{label}` | {', '.join(f'`{value}`' for value in values)} |" for label, values in _LABEL_VALUES.items()
    ]
    return "\n".join(
        [_METRICS_INTRODUCTION, *lines, "", "## Labels", "", "| label | values |", "|---|---|", *words, ""]
    )


_METRICS_INTRODUCTION = """# Metrics

<!-- Made by tools/docs_pages.py from service/shoal_service/telemetry/; run `make docs`. -->

`GET /metrics` is computed at scrape time from the store. Every control plane returns all metrics, and none is lost
when a control plane dies; counters of what a process itself has done (HTTP, passes, transactions) begin at 0 with it.
Series with `job_id` exist for jobs that have an attempt; the final values stay for a minute after the job has ended.
Times are in seconds, sizes in bytes. The endpoint also has the usual `process_...` metrics of the control plane itself.
A scraper that accepts OpenMetrics gets it: then incidents and recoveries name a job and an incident as exemplars.
[deploy/](../../deploy) has a configuration for Prometheus with alerts, and dashboards for Grafana;
[operations.md](../operations.md) says how to use them.
"""
_LABEL_VALUES: dict[str, list[str]] = {
    "state": [state.value for state in JobState],
    "state of nodes": list(NODE_STATES),
    "resource": ["cpu", "gpu"],
    "kind of transactions": ["read", "write"],
    "category": [category.value for category in Category],
    "cause": [cause.value for cause in IncidentCause],
    "outcome": [outcome.value for outcome in DeliveryOutcome],
    "phase": [phase.value for phase in RecoveryPhase],
}
"""Values of labels that have a closed set; the others are ids, routes and methods."""


def events_page() -> str:
    """The whole of docs/reference/events.md."""
    parts = [_EVENTS_INTRODUCTION]
    for topic, events in TOPICS.items():
        parts += [f"## {topic}", "", "| type | severity | when | data |", "|---|---|---|---|"]
        parts += [_event_row(event) for event in events] + [""]
    return "\n".join(parts)


def _event_row(event: type[JobEvent]) -> str:
    when = " ".join((event.__doc__ or "").split()).removesuffix(".")
    by_data = event.severity_of_this is not JobEvent.severity_of_this
    severity = f"{event.severity}, or by `to`" if by_data else str(event.severity)
    return f"| `{event.type}` | {severity} | {when} | {', '.join(_event_fields(event))} |"


def _event_fields(event: type[JobEvent]) -> Iterator[str]:
    """The names on the wire, each with its docstring in brackets."""
    docstrings = read_field_docstrings(event)
    for name, field in event.model_fields.items():
        description = " ".join(docstrings.get(name, "").split()).removesuffix(".")
        optional = "where it applies" if not field.is_required() else ""
        words = "; ".join(part for part in (description, optional) if part)
        yield f"`{name.removesuffix('_')}`" + (f" ({words})" if words else "")


_EVENTS_INTRODUCTION = """# Events

<!-- Made by tools/docs_pages.py from service/shoal_service/core/events; run `make docs`. -->

Every job has a history without gaps: `GET /v1/jobs/{id}/events` (long poll with `after=` and `wait=`, or Server-Sent
Events), `shoal events -f JOB`, `Client.events`. An event has

| key | meaning |
|---|---|
| `seq` | 1, 2, 3 ... per job |
| `at` | seconds since the epoch |
| `type` | one of those below |
| `severity` | `info`, `success`, `warning` or `error` |
| `message` | one line for people |
| `data` | the fields of the type; those whose names end in `_s` are seconds |

Later versions may add types and fields; a reader ignores what it does not know.
"""


def spec_page() -> str:
    """The whole of docs/reference/spec.md."""
    schema = JobSpec.model_json_schema()
    sections = [(key, s) for key, field in schema["properties"].items() if (s := _section(field, schema))]
    parts = [_INTRODUCTION, "## Top level\n", _table(schema["properties"], schema, "")]
    for key, section in sections:
        parts += [f"## `{key}`\n", _description(section), _table(section["properties"], schema, f"{key}.", section)]
        for inner, field in section["properties"].items():
            if field.get("type") == "array" and (element := _section(field, schema)):
                path = f"{key}.{inner}"
                parts += [f"### `{path}`\n", _description(element)]
                parts.append(_table(element["properties"], schema, f"{path}.", element))
    tasks: tuple[tuple[str, str, type[BaseModel]], ...] = (
        ("model", "the built-in language model", LanguageModelConfig),
        ("data", "the built-in language model, and of Hugging Face models", TextDataConfig),
        ("data.sources[]", "both, for mixtures", TextSource),
        ("model", "Hugging Face models", HuggingFaceConfig),
        ("model.lora", "Hugging Face models", LoraConfig),
        ("model.dpo", "preferences", DpoConfig),
        ("data", "fine-tuning on answers", AnswersConfig),
        ("data", "preferences", PreferencesConfig),
        *(
            (name, f"the task `{task.rpartition(':')[2]}`", section)
            for task, sections in SECTIONS.items()
            for name, section in zip(("model", "data"), sections, strict=True)
        ),
    )
    for key, task, model in tasks:
        task_schema = model.model_json_schema()
        parts += [
            f"## `{key}` of {task}\n",
            _description(task_schema),
            _table(task_schema["properties"], task_schema, f"{key}.", task_schema),
        ]
    return "\n".join(part for part in parts if part)


_INTRODUCTION = """# The job spec

<!-- Made by tools/docs_pages.py from the code; edit the docstrings there and run `make docs`. -->

A job is described in YAML or JSON. Unknown keys are refused with their path and the nearest valid name, and all
problems are reported together. Only `stop` is required (and `data`, for the built-in task), or `script`. The JSON
Schema is part of `/openapi.json`. Examples: [examples/](../../examples).
"""


def _section(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    for option in [field, field.get("items", {}), *field.get("anyOf", ())]:
        target = _resolved(option, schema)
        if "properties" in target:
            return target
    return None


def _table(
    properties: dict[str, Any], schema: dict[str, Any], prefix: str, section: dict[str, Any] | None = None
) -> str:
    required = set((section or schema).get("required", ()))
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in properties.items():
        nested = _section(field, schema) if not prefix else None
        name = f"[`{key}`](#{key})" if nested else f"`{prefix}{key}`"
        default = "**required**" if key in required else _default(field, nested)
        lines.append(f"| {name} | {_kind(field, schema)} | {default} | {_meaning(field, schema)} |")
    return "\n".join(lines) + "\n"


def _default(field: dict[str, Any], nested: dict[str, Any] | None) -> str:
    if nested and isinstance(field.get("default"), dict):
        return "as below"
    return f"`{json.dumps(field['default'])}`" if "default" in field else "`{}`"


def _kind(field: dict[str, Any], schema: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(option, schema) for option in field["anyOf"]))
    field = _resolved(field, schema)
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    name = _KINDS[field["type"]]
    if field["type"] == "array":
        return f"{name} of {_kind(field['items'], schema)}"
    return name + _bounds(field)


_KINDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "object",
    "array": "list",
    "null": "null",
}


def _bounds(field: dict[str, Any]) -> str:
    words = {
        "minimum": ">= {:,}",
        "exclusiveMinimum": "> {:,}",
        "maximum": "<= {:,}",
        "exclusiveMaximum": "< {:,}",
    }
    limits = [text.format(field[key]) for key, text in words.items() if key in field and abs(field[key]) < 2**31]
    return f" ({', '.join(limits)})" if limits else ""


def _meaning(field: dict[str, Any], schema: dict[str, Any]) -> str:
    text = field.get("description") or _resolved(field, schema).get("description", "")
    return " ".join(text.split()).replace("|", "\\|")


def _description(section: dict[str, Any]) -> str:
    return section.get("description", "").strip() + "\n"


def _resolved(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in field:
        return field
    target: dict[str, Any] = schema["$defs"][field["$ref"].rpartition("/")[2]]
    return target


if __name__ == "__main__":
    main()
