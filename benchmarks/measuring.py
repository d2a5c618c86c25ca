"""What the benchmarks share: comparisons interleaved in one run, the environment, and their results as JSON and PNG."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import transformers
from matplotlib.figure import Figure
from rich.progress import track
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile


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
    """Run the cases in turn, A B A B and so on, so that what else the machine does hits them alike.

    Args:
        cases: What to run, by name.
        rounds: How often each is measured.
        description: Beside the progress bar.
        warmups: Rounds before, which are not measured.

    Returns:
        The seconds of each run of each case.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for index in track(range(warmups + rounds), description=description, transient=True):
        for name, work in cases.items():
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
    """Return which share of some work each step takes, without the steps within it; "other" is the rest."""
    with _named_steps(steps), profile(activities=[ProfilerActivity.CPU]) as profiled, record_function("step:whole"):
        work()
    own: dict[str, float] = {}
    for event in profiled.events():
        if event.name.startswith("step:"):
            name = event.name.removeprefix("step:")
            own[name] = own.get(name, 0.0) + event.cpu_time_total
            outer = event.cpu_parent
            while outer is not None and not outer.name.startswith("step:"):
                outer = outer.cpu_parent
            if outer is not None:
                above = outer.name.removeprefix("step:")
                own[above] = own.get(above, 0.0) - event.cpu_time_total
    whole = sum(own.values())
    return {("other" if name == "whole" else name): round(time / whole, 3) for name, time in sorted(own.items())}


@contextmanager
def _named_steps(steps: Steps) -> Iterator[None]:
    """Let steps show in profiles by their names."""
    with ExitStack() as stack:
        for step, places in steps.items():
            for owner, attribute in places:
                stack.enter_context(patch.object(owner, attribute, _named(f"step:{step}", getattr(owner, attribute))))
        yield


def _named(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    def outer(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return inner(*args, **kwargs)

    return outer


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
