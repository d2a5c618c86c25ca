"""What the benchmarks share: comparisons interleaved in one run, the environment, and their results as JSON and PNG."""

import json
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import transformers
from matplotlib.figure import Figure
from rich.progress import track


def environment() -> dict[str, Any]:
    """Return what the figures of a run depend on, beside its settings. Call it before anything is measured."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "load_average": os.getloadavg()[0],
    }


def interleaved(
    cases: Mapping[str, Callable[[], object]], rounds: int, description: str = "", warmups: int = 1
) -> dict[str, list[float]]:
    """Run the cases in turn, so that what else the machine does hits them alike.

    Each round has its own order, drawn with a fixed seed: what runs behind a case that leaves the processor's caches
    cold, or another process awake, pays for that, and should not always be the same.

    Args:
        cases: What to run, by name.
        rounds: How often each is measured.
        description: Beside the progress bar.
        warmups: Rounds before, which are not measured.

    Returns:
        The seconds of each run of each case.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    order, draw = list(cases.items()), random.Random(0)
    for index in track(range(warmups + rounds), description=description, transient=True):
        draw.shuffle(order)
        for name, work in order:
            began = time.perf_counter()
            work()
            if index >= warmups:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median of the ratios of runs that were measured right after one another."""
    return median(above / below for above, below in zip(numerator, denominator, strict=True))


# Functions and methods that stand for a step of some work, as (owner, attribute), by the step's name.
Steps = Mapping[str, Sequence[tuple[Any, str]]]


def shares(work: Callable[[], object], steps: Steps) -> dict[str, float]:
    """Return which share of some work each step takes, without the steps within it; "other" is the rest.

    Times are those of the calling thread: on a GPU, work that waits for nothing shows where it is waited for.
    """
    own: dict[str, float] = {}
    # What the steps within each step under way have taken, the innermost last.
    within: list[float] = []

    def timed(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            within.append(0.0)
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                own[name] = own.get(name, 0.0) + took - within.pop()
                if within:
                    within[-1] += took

        return outer

    with ExitStack() as stack:
        for name, places in steps.items():
            for owner, attribute in places:
                stack.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        timed("other", work)()
    whole = sum(own.values())
    return {name: round(took / whole, 3) for name, took in sorted(own.items())}


def write_results(
    out: Path | None,
    settings: Mapping[str, Any],
    environment_: Mapping[str, Any],
    ratios: Mapping[str, float],
    **found: Any,
) -> None:
    """Write a run's JSON: settings, environment, the flat ``ratios`` that stand for it, and all else that was found."""
    if out is not None:
        content = {"settings": settings, "environment": environment_, "ratios": ratios, **found}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def save_plot(figure: Figure, out: Path | None) -> None:
    """Write a figure as PNG."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="png", dpi=130)
