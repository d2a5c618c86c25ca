"""All dashboards, and Grafana's JSON of each."""

import json
from itertools import count
from string import ascii_uppercase

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
    DashboardLinkType,
    DataSourceRef,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
)

from dashboards.cold_tier import COLD_TIER
from dashboards.importance import IMPORTANCE
from dashboards.internals import INTERNALS
from dashboards.memory import MEMORY
from dashboards.overview import OVERVIEW
from dashboards.queries import MANAGER, WORKER, Board, Graph, Light, Query

BOARDS = (OVERVIEW, MEMORY, IMPORTANCE, COLD_TIER, INTERNALS)
TAG = "scissorhands"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# What can be chosen, in this order: the variable, its label, and where its values come from.
VARIABLES = {
    "model": ("Model", f"label_values({WORKER}requests_total, model_name)"),
    "worker": ("Worker", f'label_values({WORKER}requests_total{{model_name=~"$model"}}, instance)'),
    "manager": ("Manager", f"label_values({MANAGER}store_up, instance)"),
    "policy": ("Policy", f"label_values({WORKER}evictions_total, policy)"),
}


def render(board: Board) -> str:
    """Return a dashboard as JSON text."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.name if board.name == TAG else f"{TAG}-{board.name}")
        .description(board.description)
        .tags([TAG])
        .timezone("browser")
        .time("now-30m", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Scissorhands")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .keep_time(keep_time=True)
            .include_vars(include_vars=True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name in _variables(board):
        built.with_variable(_variable(name))
    numbers = count(1)
    for title, panels in board.rows:
        built.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            number = next(numbers)
            built.with_panel(_graph(panel, number) if isinstance(panel, Graph) else _light(panel, number))
    return json.dumps(built.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _variables(board: Board) -> list[str]:
    """Return the variables that a dashboard's queries use; the model chooses workers even where no series has it."""
    used = {name for name in VARIABLES for query in board.queries if f'"${name}"' in query.expression}
    return [name for name in VARIABLES if name in used or (name == "model" and "worker" in used)]


def _variable(name: str) -> dashboard.QueryVariable:
    label, query = VARIABLES[name]
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all", selected=True))
    )


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
