"""Writes the Grafana dashboard from ``dashboard_panels``; with ``--check``, fails if the committed one differs."""

import argparse
import json
import sys
from itertools import count
from pathlib import Path
from string import ascii_uppercase

from dashboard_panels import ROWS
from dashboard_queries import Graph, Light, Query
from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    ValueMap,
    ValueMappingResult,
)

OUTPUT = Path(__file__).resolve().parent.parent / "docker" / "grafana" / "dashboards" / "scissorhands.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def _target(query: Query, index: int = 0) -> prometheus.Dataquery:
    letter = ascii_uppercase[index]
    return prometheus.Dataquery().ref_id(letter).expr(query.expression).legend_format(query.legend).range()


def _graph(graph: Graph, number: int) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .id(number)
        .title(graph.title)
        .description(graph.description)
        .datasource(SOURCE)
        .unit(graph.unit)
        .min(0)
        .line_width(1)
        .fill_opacity(8)
        .span(8)
        .height(8)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    for index, query in enumerate(graph.queries):
        panel.with_target(_target(query, index))
    return panel


def _light(light: Light, number: int) -> stat.Panel:
    states = {"0": ValueMappingResult(text="down", color="red"), "1": ValueMappingResult(text="up", color="green")}
    return (
        stat.Panel()
        .id(number)
        .title(light.title)
        .description(light.description)
        .datasource(SOURCE)
        .mappings([ValueMap(options=states)])
        .color_mode(BigValueColorMode.BACKGROUND)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .span(8)
        .height(4)
        .with_target(_target(light.query))
    )


def render() -> str:
    """Return the dashboard as JSON text."""
    board = (
        dashboard.Dashboard("Scissorhands")
        .uid("scissorhands")
        .description("Workers and cache managers: traffic, cache, plans, segments and store.")
        .tags(["scissorhands"])
        .timezone("browser")
        .time("now-30m", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    numbers = count(1)
    for title, panels in ROWS:
        board.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            number = next(numbers)
            board.with_panel(_graph(panel, number) if isinstance(panel, Graph) else _light(panel, number))
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Write the dashboard, or compare it with the committed one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed dashboard is not current")
    text = render()
    if not parser.parse_args().check:
        OUTPUT.write_text(text, encoding="utf-8")
    elif OUTPUT.read_text(encoding="utf-8") != text:
        sys.exit(f"{OUTPUT.name} is not current: run make dashboard")
    sys.stdout.write("the dashboard is current\n")


if __name__ == "__main__":
    main()
