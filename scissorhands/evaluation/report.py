"""Rows of perplexity, from one file or several, side by side: which policy is best at a budget, and what is noise.

Every row is compared to the full cache of its own file, sequence by sequence, and rows to each other by these
differences. So rows of another program on another machine can be compared, if they are of the same sequences.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.request import ORACLES
from scissorhands.evaluation.results import Results, Row, differing, read_results
from scissorhands.evaluation.statistics import Differences, interval_of_pairs, percent_of_pairs
from scissorhands.evaluation.table import Table, percent
from scissorhands.formats import EXACT

# What must be equal for losses to be of the same sequences and the same model.
_SAME = ("weights_sha256", "texts", "sequences", "length")
# All of 5 differences have one sign by chance in 1 of 16 cases, all of 6 in 1 of 32, which is below 5 %. A bootstrap
# of differences of one sign finds nothing to doubt, however few they are.
_ENOUGH = 6
# Budgets that differ by less are one: to take equal bytes, a policy with more evidence gets fewer slots.
_ALIKE = 0.02
_MIB = 2**20


@dataclass(frozen=True)
class Entry:
    """A row that can be compared.

    Args:
        row: The row.
        excess: Of each sequence, the mean loss above its full cache's.
    """

    row: Row
    excess: Differences

    @property
    def source(self) -> str:
        """What measured it; empty for this program."""
        return str(self.row.get("source", ""))

    @property
    def name(self) -> str:
        """The policy, with what else it is named by."""
        row = self.row
        # A source is a program and its version; its rows may name the program before the policy as well.
        policy = str(row["policy"]).removeprefix(f"{self.source.partition(' ')[0]}:")
        parts = [policy, *([] if row["codec"] == EXACT else [row["codec"]]), *([self.source] if self.source else [])]
        return ", ".join(parts)

    @property
    def share(self) -> float:
        """The share of a full cache that it is to be compared at: of its slots, or of its bytes if those are packed."""
        if self.row["codec"] == EXACT or self.row["budget"] == 1:
            return float(self.row["budget"])
        return float(1 / self.row["compression"])

    @property
    def clairvoyant(self) -> bool:
        """Whether it knows the future: a floor, and no policy that could be chosen."""
        return self.row["policy"] in ORACLES


@dataclass(frozen=True)
class Verdict:
    """How an entry compares to the best of its budget.

    Args:
        percent: By how much its perplexity is above that of the best; 0 for the best itself.
        interval: 95 % interval of that, over sequences in pairs; None for one sequence.
        best: Whether it is the best.
        enough: Whether there are sequences enough to tell a difference from noise.
    """

    percent: float
    interval: tuple[float, float] | None
    best: bool
    enough: bool

    @property
    def noise(self) -> bool:
        """Whether the difference may be none at all."""
        return not self.best and (not self.enough or self.interval is None or self.interval[0] <= 0 <= self.interval[1])

    def __str__(self) -> str:
        if self.best:
            return "best"
        remark = ", within noise" if self.enough else ", too few sequences to tell"
        return f"{percent(self.percent, self.interval)}{remark if self.noise else ''}"


def read_files(paths: Sequence[Path]) -> list[Results]:
    """Read files of perplexity, which must be of equal settings.

    Raises:
        InvalidRequestError: A file is something else, or of other sequences or another model than the first.
    """
    found = [read_results(path) for path in paths]
    for path, results in zip(paths, found, strict=True):
        ours, first = ({name: each.settings.get(name) for name in _SAME} for each in (results, found[0]))
        if different := differing(ours, first):
            raise InvalidRequestError(
                "json", f"{path} cannot be compared to {paths[0]}: other settings ({', '.join(different)})"
            )
    return found


def entries(found: Iterable[Results]) -> list[Entry]:
    """Return the rows of all results; of rows with equal names, the last.

    Raises:
        InvalidRequestError: A row lacks the losses of its sequences.
    """
    by_name: dict[tuple[Any, ...], Entry] = {}
    for results in found:
        for row in results.rows:
            try:
                entry = Entry(row, _means(row) - _means(results.full))
                by_name[entry.name, row["budget"], row["bytes_16_bit"]] = entry
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidRequestError(
                    "json", f"the row of {row.get('policy')!r} cannot be compared: no field {error}; measure it again"
                ) from error
    group = _groups(by_name.values())
    return sorted(by_name.values(), key=lambda entry: (-group[entry.share], entry.row["increase_percent"]))


def verdicts(found: Sequence[Entry]) -> list[Verdict | None]:
    """Compare each entry to the best of about its budget, in pairs of sequences; None for what knows the future."""
    best: dict[float, Entry] = {}
    group = _groups(found)
    for entry in found:
        budget = group[entry.share]
        if not entry.clairvoyant and (budget not in best or entry.excess.mean() < best[budget].excess.mean()):
            best[budget] = entry
    return [None if entry.clairvoyant else _verdict(entry, best[group[entry.share]]) for entry in found]


def perplexity_table(found: Sequence[Entry], full: Row) -> Table:
    """Return all entries as a table, with the full cache first."""
    headings = (
        "Policy", "Budget", "MiB", "Compression", "Perplexity", "Increase", "After the first eviction", "Above the best"
    )  # fmt: skip
    lines = [("full", "1", "", "", f"{full['perplexity']:.3f}", "", "", "")]
    for entry, verdict in zip(found, verdicts(found), strict=True):
        row = entry.row
        lines.append(
            (
                entry.name,
                f"{row['budget']:g}{' (raised)' if row.get('raised') else ''}",
                f"{row['bytes_16_bit'] / _MIB:.2f}",
                f"{row['compression']:.2f}x",
                f"{row['perplexity']:.3f}",
                percent(row["increase_percent"], row["ci95"]),
                percent(row["increase_percent_after_eviction"], row["ci95_after_eviction"]) or "none evicted",
                "knows the future" if verdict is None else str(verdict),
            )
        )
    return Table(headings, lines)


def _groups(found: Iterable[Entry]) -> dict[float, float]:
    """Return the share that each share counts as: the largest that is about as large."""
    counted: dict[float, float] = {}
    largest = np.inf
    for share in sorted({entry.share for entry in found}, reverse=True):
        largest = share if largest * (1 - _ALIKE) > share else largest
        counted[share] = largest
    return counted


def _verdict(entry: Entry, best: Entry) -> Verdict:
    differences = entry.excess - best.excess
    return Verdict(
        percent_of_pairs(differences), interval_of_pairs(differences), entry is best, len(differences) >= _ENOUGH
    )


def _means(of: Row) -> Differences:
    means: Differences = np.array(of["loss_sums"], dtype=np.float64) / of["loss_count"]
    return means
