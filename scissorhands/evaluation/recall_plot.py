"""The plot of recall: what is found with the full cache, without recall and with it, at each budget."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from scissorhands.evaluation.results import Row
from scissorhands.evaluation.statistics import share_interval

_WIDTH = 0.38
_COLORS = {"without recall": "tab:orange", "with recall": "tab:blue"}


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the share of facts found over all lengths and places, with 95 % intervals; writes a PNG.

    Args:
        rows: The rows.
        title: What was hidden.
        path: The file.
    """
    governed = [row for row in rows if row["policy"] != "full"]
    groups = list(dict.fromkeys((row["policy"], row["budget"]) for row in governed))
    figure = Figure(figsize=(2.6 + 1.3 * len(groups), 3.6), layout="constrained")
    axes = figure.subplots()
    for offset, (label, color) in zip((-_WIDTH / 2, _WIDTH / 2), _COLORS.items(), strict=True):
        for place, group in enumerate(groups):
            own = [
                row
                for row in governed
                if (row["policy"], row["budget"]) == group and (row["recall"] is not None) == (label == "with recall")
            ]
            found, trials = (sum(row[name] for row in own) for name in ("found", "trials"))
            low, high = share_interval(found, trials)
            share = found / trials
            axes.bar(place + offset, share, _WIDTH, color=color, label=None if place else label)
            axes.errorbar(place + offset, share, [[share - low], [high - share]], color="black", capsize=3)
            axes.text(place + offset, 0.02, f"{found}/{trials}", ha="center", fontsize="small", color="white")
    full = [row for row in rows if row["policy"] == "full"]
    share = sum(row["found"] for row in full) / sum(row["trials"] for row in full)
    axes.axhline(share, color="black", linestyle="--", linewidth=1, label="full cache")
    axes.set_xticks(range(len(groups)), [f"{policy}\n{budget:g} of the tokens" for policy, budget in groups])
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("share found")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")  # Beside the bars, which may reach the top.
    figure.savefig(path, format="png", dpi=130)
