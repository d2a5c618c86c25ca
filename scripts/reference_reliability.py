"""The page of what may go wrong, from the results of ``tests/faults.py`` and ``tests/soak.py``."""

import json
from pathlib import Path
from typing import Any

from reference_markdown import page, table, text

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

_HEAD = """\
What goes wrong with machines, networks, stores and clients, what is promised then, and what happened when it was
tried. `python tests/faults.py` starts a store, two managers and two workers with a tiny seeded model as processes of
their own, with lines between them that can be long, narrow, lossy, dead or cut, and tries one fault after another in
the middle of answers. Whatever the fault, all cases promise that

- no token is wrong: each is compared with the answer of an idle worker, also of answers that end early;
- nothing hangs: a call ends with its answer, a status, or at its deadline;
- nothing leaks: afterwards both workers answer as ever, gauges are back at zero, and processes that were not killed
  have neither much more memory nor many more descriptors.

Three faults are less than their names: the clock jumps in the Python of manager and worker, and not in the store; what
is lost on a line comes 0.2 s late, when TCP would send it again; and the store's full disk is a limit on its files.

The command ends with status 1 if a promise does not hold. `--list` names the cases, `--all` tries all. A few are part
of every test run."""
_SOAK_COMMAND = """\
    python tests/soak.py --minutes 30 --clients 16 --json benchmarks/results/soak.json \\
        --plot benchmarks/results/soak.png"""


def reliability_page() -> str:
    """Return the page."""
    faults, soak = (json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in ("faults", "soak"))
    return page("Reliability", _HEAD, _faults(faults), _soak(soak))


def _faults(found: dict[str, Any]) -> str:
    rows = [
        [
            text(case["fault"]),
            text(case["promised"]),
            text("; ".join(case["broken"]) or case["happened"]),
            f"`python tests/faults.py --case {case['name']}`",
        ]
        for case in found["cases"]
    ]
    heading = f"## {len(rows)} faults, {found['ratios']['broken'] or 'none'} with a broken promise"
    return "\n\n".join([heading, table(["What went wrong", "Promised", "Happened", "Again"], rows), _machine(found)])


def _soak(found: dict[str, Any]) -> str:
    settings, answers = found["settings"], found["answers"]
    memory = [
        [
            name,
            f"{own['mib_after_warm_up']}",
            f"{own['mib_at_end']}",
            f"{own['mib_per_hour']:+}",
            f"{own['descriptors_first']}, {own['descriptors_most']}, {own['descriptors_last']}",
        ]
        for name, own in found["memory"].items()
    ]
    statuses = ", ".join(f"{count:,} {name}" for name, count in answers["statuses"].items())
    told = [
        f"{sum(found['faults'].values()):,} faults of {len(found['faults'])} kinds.",
        f"{answers['asked']:,} questions: {answers['answered']:,} answered whole, {answers['cancelled']:,} cancelled.",
        f"{answers['asked_again']:,} asked again, {answers['resumed_turns']:,} went on from a stored row.",
        f"All calls by status: {statuses}.",
        f"Gauges that were not zero in the end: {', '.join(found['gauges_left']) or 'none'}.",
        f"Broken promises: {'; '.join(map(text, found['broken'])) or 'none'}.",
    ]
    how = f"{settings['minutes']:g} minutes, {settings['clients']} clients, seed {settings['seed']}: some answers are "
    how += "cancelled, some read slowly, some are turns of conversations, while faults like those above are injected "
    how += "at random, one after another."
    return "\n\n".join(
        [
            "## Soak",
            how,
            _SOAK_COMMAND,
            "\n".join(f"- {line}" for line in told),
            "Of the processes that are never killed:",
            table(["", "MiB after a quarter", "at the end", "MiB an hour", "descriptors first, most, last"], memory),
            "![Memory and descriptors over time](../benchmarks/results/soak.png)",
            _machine(found),
        ]
    )


def _machine(found: dict[str, Any]) -> str:
    of = found["environment"]
    return f"Measured on {of['platform']}, {of['processors']} processors, Python {of['python']}."
