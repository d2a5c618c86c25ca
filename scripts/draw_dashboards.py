"""Draw docs/dashboards.png and write docs/dashboards.md: what every panel's query gives over real traffic.

A system with the real model runs, with a Prometheus that scrapes it every second by the committed configuration.
Grafana is not needed: panels are drawn here, from what their own queries give. It needs the model (`make model`),
Debian's package prometheus (`make services`), and some minutes.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import click
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dashboards.asked import Asked, answers, panel_queries
from dashboards.recording import Prometheus, Series, recorded
from dashboards.traffic import ENVIRONMENT, OPTIONS, Scale, Traffic

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "smollm2-135m-instruct"
TEXT = ROOT / "examples" / "texts" / "pride-and-prejudice.txt"
PICTURE, PAGE = ROOT / "docs" / "dashboards.png", ROOT / "docs" / "dashboards.md"
TOKENS, NEW_TOKENS, SLOTS = 300, 48, 96
CHARACTERS_PER_TOKEN = 4
# So little that whole objects must go.
SPACE = {"SCISSORHANDS_MANAGER_STORE_HIGH_BYTES": "7000000"}
SETTLE_SECONDS = 5.0
# What is drawn, by dashboard.
DRAWN = (
    ("overview", "Requests"), ("overview", "Tokens"), ("overview", "Time to first token"),
    ("memory", "Against full caches"), ("memory", "Compression"), ("memory", "Rows"),
    ("importance", "Evictions by policy"), ("importance", "Recent attention dropped"), ("cold tier", "Hit rate"),
    ("cold tier", "Bytes to the store"), ("internals", "Plans applied"), ("internals", "Plan latency"),
)  # fmt: skip
COLUMNS = 3
MOST_SERIES = 6
# How values of a unit are shown, and by what they are multiplied.
FORMS = {
    "s": ("{:.3g} s", 1.0),
    "ms": ("{:.3g} ms", 1.0),
    "percentunit": ("{:.1f} %", 100.0),
    "bytes": ("{:.3g} MiB", 2.0**-20),
    "binBps": ("{:.3g} MiB/s", 2.0**-20),
    "reqps": ("{:.3g}/s", 1.0),
    "suffix:x": ("{:.2f}x", 1.0),
}

Found = Sequence[tuple[Asked, Sequence[Series]]]


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), default=MODEL, help="A folder.")
def main(model: Path) -> None:
    """Record traffic, draw panels and write the table of all queries."""
    with tempfile.TemporaryDirectory() as name, recorded(Path(name), model, OPTIONS, {**ENVIRONMENT, **SPACE}) as found:
        begin = time.time()
        time.sleep(2)  # Every counter is scraped before it moves.
        Traffic(found.state["worker"]["address"], Scale(prompt, TOKENS, NEW_TOKENS, SLOTS)).run()
        time.sleep(SETTLE_SECONDS)
        queries = asked_all(found.prometheus, begin, time.time())
    draw(queries, begin).savefig(PICTURE, format="png", dpi=100)
    PAGE.write_text(page(queries), encoding="utf-8")
    click.echo(f"wrote {PICTURE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")


def prompt(number: int, tokens: int) -> str:
    """Return a part of a novel, another one for each number."""
    text = TEXT.read_text(encoding="utf-8")
    size = tokens * CHARACTERS_PER_TOKEN
    start = number * size % max(1, len(text) - size)
    return text[start : start + size]


def asked_all(prometheus: Prometheus, begin: float, end: float) -> Found:
    """Ask the queries of all panels."""
    return [(asked, answers(prometheus, asked, begin, end)) for asked in panel_queries()]


def page(found: Found) -> str:
    """Return the page: the picture, and a table of every dashboard's queries."""
    told = (
        "What every query of every panel gave over real traffic: `scissorhands up` with SmolLM2-135M on one machine, "
        f"prompts of about {TOKENS} tokens, budgets of {SLOTS}, and a real Prometheus that scraped it every second. "
        "`python scripts/draw_dashboards.py` does it again. *Latest* is the last value of the largest series."
    )
    picture = "The picture is no screenshot of Grafana: it draws the panels' own queries."
    lines = ["# Dashboards", "", told, "", picture, "", "![Twelve panels](dashboards.png)"]
    for board, queries in groupby(found, lambda each: each[0].board):
        title = board.removeprefix("Scissorhands: ")
        lines += ["", f"## {title.capitalize()}", "", "| Panel | Query | Series | Latest |", "|---|---|--:|--:|"]
        for asked, series in queries:
            query = asked.expression.replace("|", "\\|")
            lines.append(f"| {asked.panel} | `{query}` | {len(series)} | {latest(asked, series)} |")
    return "\n".join(lines) + "\n"


def latest(asked: Asked, series: Sequence[Series]) -> str:
    """Return the last value of the largest series, with its unit."""
    if not series:
        return "none"
    return shown(max(each.points[-1][1] for each in series), asked.unit)


def shown(value: float, unit: str) -> str:
    """Return a value as a panel with this unit shows it."""
    if unit == "s" and value < 1:
        value, unit = value * 1e3, "ms"
    form, factor = FORMS.get(unit, ("{:.4g}", 1.0))
    return form.format(value * factor)


def draw(found: Found, begin: float) -> Figure:
    """Draw some panels."""
    figure = Figure(figsize=(15, 11), layout="constrained")
    all_axes = figure.subplots(-(-len(DRAWN) // COLUMNS), COLUMNS).flat
    for axes, (board, panel) in zip(all_axes, DRAWN, strict=True):
        queries = [each for each in found if (each[0].board, each[0].panel) == (f"Scissorhands: {board}", panel)]
        if not queries:
            raise click.ClickException(f"there is no panel {panel!r} of {board!r}")
        draw_panel(axes, queries, begin)
        axes.set_title(f"{panel} ({board})", fontsize=11)
    return figure


def draw_panel(axes: Axes, queries: Found, begin: float) -> None:
    """Draw the largest series of one panel, by seconds since the beginning."""
    lines = [(asked, each) for asked, series in queries for each in series]
    lines.sort(key=lambda line: max(value for _, value in line[1].points), reverse=True)
    for asked, each in lines[:MOST_SERIES]:
        times, values = zip(*each.points, strict=True)
        axes.plot([at - begin for at in times], values, linewidth=1.3, label=named(asked.legend, each.labels))
    unit = queries[0][0].unit
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Fill in a legend's template."""
    for label, value in labels.items():
        legend = legend.replace(f"{{{{{label}}}}}", value)
    return legend


if __name__ == "__main__":
    main()
