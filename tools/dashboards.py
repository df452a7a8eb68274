"""Writes deploy/grafana/*.json, the dashboards for Grafana, with the builders of grafana-foundation-sdk (`make docs`).

    python tools/dashboards.py

The panels are in tools/grafana/. A test compares the files with what this makes, and evaluates every query.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueTextMode,
    ScaleDistribution,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    GridPos,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.fleet import FLEET
from grafana.job import JOB
from grafana.panel import Board, Look, Panel
from grafana.service import SERVICE

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
BOARDS = {"fleet.json": FLEET, "job.json": JOB, "service.json": SERVICE}
_SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
_WIDTH = 24
_SIZES = {Look.NUMBER: (4, 4), Look.TABLE: (24, 7), Look.LINES: (8, 8), Look.STACKED: (8, 8)}
"""Width and height of a panel, in cells of Grafana's grid."""
_NAME_AND_ID = '/job_id="(?<value>[^"]+)".*[{,]name="(?<text>[^"]+)"/'
"""The variable shows the names of jobs and stands for their ids."""


def main() -> None:
    for name, board in BOARDS.items():
        (FOLDER / name).write_text(document(board), encoding="utf-8")


def document(board: Board) -> str:
    """The file of a dashboard."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .tags(["shoal"])
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.TextBoxVariable("shoal").label("Address of Shoal").default_value("http://127.0.0.1:8470")
        )
        .link(_link("Shoal", f"${{shoal}}{'/jobs/${job}' if board.has_job else '/fleet'}"))
        .link(
            dashboard.DashboardLink("Dashboards").type(DashboardLinkType.DASHBOARDS).tags(["shoal"]).include_vars(True)
        )
    )
    if board.has_job:
        made.with_variable(
            dashboard.QueryVariable("job")
            .label("Job")
            .datasource(_SOURCE)
            .query("query_result(shoal_job_info)")
            .regex(_NAME_AND_ID)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_DESC)
            .current(VariableOption(selected=False, text="", value=""))
        )
    top = 0
    for title, panels in board.rows.items():
        made.with_row(dashboard.Row(title).grid_pos(GridPos(h=1, w=_WIDTH, x=0, y=top)))
        places = _flow(panels, top + 1)
        for panel, place in zip(panels, places, strict=True):
            made.with_panel(_panel(panel, board).grid_pos(place))
        top = max(place.y + place.h for place in places)
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(made.build())), indent=1, sort_keys=True) + "\n"


def _flow(panels: tuple[Panel, ...], top: int) -> list[GridPos]:
    """Places panels side by side, in lines: a line is as high as its highest panel."""
    places: list[GridPos] = []
    left = line = 0
    for panel in panels:
        width, height = _SIZES[panel.look]
        if left + width > _WIDTH:
            left, top, line = 0, top + line, 0
        places.append(GridPos(h=height, w=width, x=left, y=top))
        left, line = left + width, max(line, height)
    return places


def _link(title: str, url: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(title).type(DashboardLinkType.LINK).url(url).target_blank(True).keep_time(False)


def _panel(panel: Panel, board: Board) -> Any:
    made: Any
    match panel.look:
        case Look.NUMBER:
            is_state = any(query.legend for query in panel.queries)
            made = (
                stat.Panel()
                .color_mode(BigValueColorMode.NONE)
                .text_mode(BigValueTextMode.NAME if is_state else BigValueTextMode.VALUE)
            )
            if board.has_job:
                made.no_value("none, or the job has ended")
        case Look.TABLE:
            made = table.Panel()
        case Look.LINES | Look.STACKED:
            made = (
                timeseries.Panel()
                .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
                .fill_opacity(30 if panel.look is Look.STACKED else 0)
            )
            if panel.look is Look.STACKED:
                made.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
            if panel.is_log:
                made.scale_distribution(common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    made.title(panel.title).unit(panel.unit).datasource(_SOURCE)
    if any("job_id" in query.legend for query in panel.queries):
        made.data_links([_link("Page of the job", "${shoal}/jobs/${__field.labels.job_id}")])
    elif panel.look is Look.TABLE and "job_id" in panel.queries[0].expr and not board.has_job:
        made.data_links([_link("Page of the job", "${shoal}/jobs/${__data.fields.job_id}")])
    if panel.help:
        made.description(panel.help)
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
        if panel.look is Look.TABLE:
            target.instant().format(PromQueryFormat.TABLE)
        elif panel.look is Look.LINES:
            target.range().exemplar(True)
        else:
            target.range()
        made.with_target(target)
    return made


if __name__ == "__main__":
    main()
