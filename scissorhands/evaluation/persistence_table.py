"""The tables of ``eval persistence``."""

from scissorhands.evaluation.results import Row
from scissorhands.evaluation.table import Table


def persistence_table(rows: list[Row]) -> Table:
    """Return the means over layers and heads, a line for each kind of weights and of pivotal sets."""
    headings = ("Weights", "Pivotal to", "Pivotal tokens", "Persistence ratio", "Beyond chance")
    lines = [
        (
            row["of"],
            pivotal_to(found["share"]),
            *(_percent(found[f"{name}_percent"]) for name in ("pivotal", "ratio", "beyond_chance")),
        )
        for row in rows
        for found in row.get("sets", ())
    ]
    return Table(headings, lines)


def change_table(rows: list[Row]) -> Table:
    """Return the means over layers and heads, a line for each policy and budget."""
    headings = ("Policy", "Budget", "Slots", "Pivotal and evicted", "Change of those kept")
    lines = [
        (
            row["policy"],
            f"{row['budget']:g}{' (raised)' if row['raised'] else ''}",
            str(row["slots"]),
            f"{row['dropped_percent']:.1f} %",
            f"{row['change_percent_of_kept']:.1f} %",
        )
        for row in rows
        if "histogram" in row
    ]
    return Table(headings, lines)


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f} %"


def pivotal_to(share: float) -> str:
    """Say how many queries make a token pivotal."""
    return f"over {share:.0%} of queries" if share else "any query"
