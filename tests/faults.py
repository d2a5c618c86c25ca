"""Everything that may go wrong with a system of real processes, one case at a time, and what becomes of answers.

    python tests/faults.py --list
    python tests/faults.py --case manager-killed
    python tests/faults.py --all --json benchmarks/results/faults.json

A store, two managers and two workers with a tiny seeded model are started once; clients compare every token with the
answer of an idle worker. Each case says what it promises; all promise that no token is wrong, no call goes on after its
deadline, gauges come back to zero and processes keep neither memory nor descriptors. The command fails if a promise is
broken. It needs Linux and redis-server. ``docs/reliability.md`` is made from the results.
"""

import asyncio
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from support.faults.questions import solo_questions
from support.faults.stack import Stack
from support.faults.table import CASES
from support.faults.trial import tried


@click.command()
@click.option("--list", "listed", is_flag=True, help="Name the cases and what they promise.")
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="Try this one; may be repeated.")
@click.option("--all", "every", is_flag=True, help="Try all.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
def main(*, listed: bool, names: tuple[str, ...], every: bool, out: Path | None) -> None:
    """Let things go wrong; fail if a promise is broken."""
    if listed:
        for case in CASES.values():
            click.echo(f"{case.name}: {case.fault}. Promised: {case.promised}")
        return
    if not names and not every:
        raise click.UsageError("say --list, --case NAME or --all")
    found = asyncio.run(try_all([CASES[name] for name in (CASES if every else names)]))
    broken = sum(bool(case["broken"]) for case in found)
    if out is not None:
        result = {
            "environment": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "processors": os.cpu_count(),
                **{name: version(name) for name in ("grpcio", "redis", "torch")},
            },
            "ratios": {"cases": len(found), "broken": broken},
            "cases": found,
        }
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    click.echo(f"{len(found)} cases, {broken} broken")
    sys.exit(broken > 0)


async def try_all(cases):
    """Return what happened in each case."""
    with TemporaryDirectory(prefix="faults-") as folder:
        questions = await solo_questions(Path(folder))
        async with Stack(Path(folder)) as stack:
            found = []
            for case in cases:
                found.append(await tried(case, stack, questions))
                told = "; ".join(found[-1]["broken"]) or "held"
                click.echo(f"{case.name}: {found[-1]['happened']} ({found[-1]['seconds']} s): {told}")
            return found


if __name__ == "__main__":
    main()
