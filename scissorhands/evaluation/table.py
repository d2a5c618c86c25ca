"""The table at the end of an evaluation."""

from rich import box
from rich.table import Table

from scissorhands.evaluation.results import Results, Row


def table(results: Results, rows: list[Row]) -> Table:
    """Return the full cache and ``rows`` as a table."""
    made = Table(box=box.SIMPLE)
    made.add_column("Policy")
    made.add_column("Codec")
    for heading in ("Budget", "Slots", "Compression", "Perplexity", "Increase", "95% interval", "After eviction"):
        made.add_column(heading, justify="right")
    made.add_row("full", "none", "1", str(results.settings["length"]), "", f"{results.full['perplexity']:.3f}")
    for row in rows:
        interval, after = row["ci95"], row["increase_percent_after_eviction"]
        made.add_row(
            row["policy"],
            row["codec"],
            f"{row['budget']:g}",
            f"{row['slots']}{' (raised)' if row['raised'] else ''}",
            f"{row['compression']:.2f}x",
            f"{row['perplexity']:.3f}",
            f"{row['increase_percent']:+.2f}%",
            f"{interval[0]:+.2f} to {interval[1]:+.2f}%" if interval else "",
            "none evicted" if after is None else f"{after:+.2f}%",
        )
    return made
