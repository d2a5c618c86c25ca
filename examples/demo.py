"""One prompt, answered under a hard cache budget by the whole system on this machine.

Starts store, manager and worker as processes (``scissorhands up``), asks about a chapter of a novel with a fifth of the
cache, shows what that took and dropped, checks the figures against /metrics, asks again with the full cache, and stops
everything. ``make demo`` runs it.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from scissorhands_client import (
    Accepted,
    Budget,
    ChatMessage,
    Client,
    Delta,
    Finish,
    GenerateOptions,
    ManagerClient,
    PrefillProgress,
    Session,
)

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "smollm2-135m-instruct"
TEXT = ROOT / "examples" / "texts" / "pride-and-prejudice.txt"
QUESTION = "What do Mr. and Mrs. Bennet talk about? Answer in a few sentences."
BUDGET = 0.2
NEW_TOKENS = 96
REPETITION_PENALTY = 1.1
READY_SECONDS = 240.0
ANSWER_SECONDS = 240.0
SETTLE_SECONDS = 20.0
STOP_SECONDS = 60.0

CONSOLE = Console()
Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]


@contextmanager
def running_system() -> Iterator[dict[str, Any]]:
    """Run ``scissorhands up`` on free ports and yield its addresses; stop it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state.json"
        ports = ("--port", "0", "--metrics-port", "0", "--manager-port", "0", "--manager-metrics-port", "0")
        command = [
            sys.executable,
            "-m",
            "scissorhands",
            "up",
            "--model",
            str(MODEL),
            "--state-file",
            str(state),
            *ports,
        ]
        process = subprocess.Popen(command)  # noqa: S603 - our own command
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not state.exists():
                if process.poll() is not None:
                    sys.exit(f"the system did not start: exit status {process.returncode}")
                if time.monotonic() > deadline:
                    sys.exit(f"the system was not ready after {READY_SECONDS:.0f} s")
                time.sleep(0.1)
            yield json.loads(state.read_text())
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


@dataclass
class Answer:
    """One answer: its events, its text, and the bytes that the worker's gauge showed while it decoded."""

    accepted: Accepted
    finish: Finish
    text: str
    allocated: float


def answer(client: Client, title: str, options: GenerateOptions, metrics_url: str) -> Answer:
    """Stream one answer to the console."""
    prompt = [ChatMessage("user", f"{TEXT.read_text()}\n\n{QUESTION}")]
    CONSOLE.rule(title)
    text, allocated = "", 0.0
    bar = (TextColumn("reading the prompt"), BarColumn(), TextColumn("{task.completed} of {task.total} tokens"))
    progress = Progress(*bar, console=CONSOLE, transient=True)
    task = progress.add_task("", total=None)
    progress.start()
    with client.generate(prompt, options) as stream:
        for event in stream:
            if isinstance(event, Accepted):
                accepted = event
            elif isinstance(event, PrefillProgress):
                progress.update(task, completed=event.done, total=event.total)
            elif isinstance(event, Delta):
                if not text:
                    progress.stop()
                allocated = allocated or total(scrape(metrics_url), "worker_cache_allocated_bytes")
                text += event.text
                print(event.text, end="", flush=True)
            else:
                finish = event
    print()
    return Answer(accepted, finish, text, allocated)


def scrape(url: str) -> Metrics:
    """Read a metrics endpoint."""
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - a loopback address that we chose
        families = text_string_to_metric_families(response.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Add up the series of a name that have these labels."""
    wanted = set(labels.items())
    return sum(value for (found, have), value in metrics.items() if found == f"scissorhands_{name}" and wanted <= have)


def settled(manager: ManagerClient, given: Answer, metrics_url: str) -> tuple[Session, Metrics]:
    """Return the session and the worker's metrics once every segment has reached the store."""
    deadline = time.monotonic() + SETTLE_SECONDS
    segments = given.finish.cache.segments
    while True:
        session, metrics = manager.get_session(given.accepted.session_id), scrape(metrics_url)
        arrived = total(metrics, "worker_segments_total", result="offloaded")
        if (session.segment_count >= segments and arrived >= segments) or time.monotonic() > deadline:
            return session, metrics
        time.sleep(0.05)


def figures(given: Answer, stored: int) -> dict[str, float]:
    """Return the figures that /metrics must agree with."""
    usage, cache = given.finish.usage, given.finish.cache
    return {
        "Prompt tokens": usage.prompt_tokens,
        "Generated tokens": usage.generated_tokens,
        "Allocated bytes": cache.allocated_bytes,
        "Slots evicted": cache.evicted_slots,
        "Attention mass dropped": cache.mass_dropped,
        "Plans from the manager": cache.plans_manager,
        "Plans made locally": cache.plans_local,
        "Prefill stall (s)": cache.prefill_stall_seconds,
        "Segments stored": cache.segments,
        "Bytes in the store": stored,
    }


def measured(worker: Metrics, manager: Metrics, allocated: float) -> dict[str, float]:
    """Return the same figures from /metrics."""
    mass = total(worker, "worker_attention_mass_total")
    return {
        "Prompt tokens": total(worker, "worker_prompt_tokens_total"),
        "Generated tokens": total(worker, "worker_generated_tokens_total"),
        "Allocated bytes": allocated,
        "Slots evicted": total(worker, "worker_evicted_slots_total"),
        "Attention mass dropped": total(worker, "worker_attention_mass_dropped_total") / mass,
        "Plans from the manager": total(worker, "worker_plans_total", source="manager"),
        "Plans made locally": total(worker, "worker_plans_total", source="local"),
        "Prefill stall (s)": total(worker, "worker_prefill_stall_seconds_total"),
        "Segments stored": total(worker, "worker_segments_total", result="offloaded"),
        "Bytes in the store": total(manager, "manager_store_bytes"),
    }


def shown(name: str, value: float) -> str:
    """Format a figure for people."""
    if name == "Attention mass dropped":
        return f"{value:.2%}"
    return f"{value:,.3f}" if name.endswith("(s)") else f"{value:,.0f}"


def _compression(finish: Finish) -> str:
    return f"{finish.cache.compression or 0:.2f}x"


def _compression_16bit(finish: Finish) -> str:
    return f"{finish.cache.compression_16bit or 0:.2f}x"


def _speed(finish: Finish) -> str:
    return f"{finish.usage.tokens_per_second or 0:.1f}"


def _first_token(finish: Finish) -> str:
    return f"{finish.usage.time_to_first_token_seconds:.1f}"


def table(told: dict[str, float], found: dict[str, float], budgeted: Answer, full: Answer) -> Table:
    """Put the answer with the budget, the same from /metrics, and the full-cache answer side by side."""
    result = Table(title=f"{MODEL.name}, {TEXT.stem}", box=box.SIMPLE_HEAD, title_justify="left")
    result.add_column("")
    for title in (f"budget {BUDGET:.0%}", "in /metrics", "full cache"):
        result.add_column(title, justify="right")
    beside = figures(full, stored=0)
    for name, value in told.items():
        result.add_row(name, shown(name, value), shown(name, found[name]), shown(name, beside[name]))
    few, all_of_it = budgeted.finish, full.finish
    result.add_row("Full-cache bytes", f"{few.cache.full_bytes:,}", "", f"{all_of_it.cache.full_bytes:,}")
    for name, figure in (
        ("All-in compression", _compression),
        ("All-in compression, to 16 bits", _compression_16bit),
        ("Tokens per second", _speed),
        ("Time to first token (s)", _first_token),
    ):
        result.add_row(name, figure(few), "", figure(all_of_it))
    return result


def main() -> int:
    """Run the demonstration; return 0 if its figures agree with /metrics."""
    CONSOLE.print(f"Starting store, manager and worker with {MODEL.name} …", highlight=False)
    full_options = GenerateOptions(policy="full", max_new_tokens=NEW_TOKENS, repetition_penalty=REPETITION_PENALTY)
    options = replace(full_options, policy=None, budget=Budget.fraction(BUDGET))
    with running_system() as system:
        worker_url, manager_url = system["worker"]["metrics"], system["manager"]["metrics"]
        with (
            Client(system["worker"]["address"], timeout=ANSWER_SECONDS) as client,
            ManagerClient(system["manager"]["address"]) as manager,
        ):
            budgeted = answer(client, f"Answer with a budget of {BUDGET:.0%}", options, worker_url)
            session, metrics = settled(manager, budgeted, worker_url)
            told = figures(budgeted, session.segment_bytes)
            found = measured(metrics, scrape(manager_url), budgeted.allocated)
            full = answer(client, "The same with the full cache", full_options, worker_url)
    CONSOLE.print(table(told, found, budgeted, full))
    same = "the same as" if budgeted.text == full.text else "different from"
    CONSOLE.print(f"The answer under the budget is {same} the full-cache answer.")
    wrong = [name for name, value in told.items() if not math.isclose(value, found[name], rel_tol=1e-6, abs_tol=1e-8)]
    if wrong:
        CONSOLE.print(f"[red]These figures differ from /metrics: {', '.join(wrong)}[/red]")
        return 1
    CONSOLE.print("All figures agree with /metrics.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
