"""Measure kvpress and QuantizedCache on the same work as ``scissorhands eval perplexity``, into the same format.

    python -m benchmarks.peers.run --model M --text FILE --budget 0.2 --json peers.json
    scissorhands eval report quality.json peers.json

The full cache comes first, on both sides: their losses must agree. Then every press and cache is tried on a short run,
and those that work are measured. What is done is kept, so that a run can be stopped and continued.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console

from benchmarks.peers import environment
from benchmarks.peers.checks import Checks
from benchmarks.peers.presses import FULL, PEERS, Peer
from benchmarks.peers.program import PROGRAM, PeerError, Program
from scissorhands.budget import HALF_BYTES, ModelShape
from scissorhands.commands import click_errors, writable
from scissorhands.evaluation import statistics
from scissorhands.evaluation.cells import Advance, Cell, Runner
from scissorhands.evaluation.losses import full_fields, full_losses, loss_fields
from scissorhands.evaluation.perplexity import measure
from scissorhands.evaluation.request import Choice, Request
from scissorhands.evaluation.results import Results, Row
from scissorhands.evaluation.setup import Setup, prepare, tell_anew
from scissorhands.evaluation.sizes import Sizes
from scissorhands.evaluation.statistics import Losses
from scissorhands.evaluation.texts import Tokens, read_text

# Sequences, and tokens of each: those of `scissorhands eval perplexity`.
NORMAL = (8, 2048)
QUICK = (2, 512)
# Nats; both sides run the same model.
MOST_DIFFERENCE = 1e-3
COMPRESSION_BASIS = (
    "a full cache of 16-bit keys and values, over keys and values just before a compression and what the press keeps "
    "between passes, all in 16 bits; kvpress stores no positions"
)
PACKED_BASIS = (
    "a full cache of 16-bit keys and values, over the most that the tensors of the cache take between passes (packed "
    "numbers as they are, scales, shifts and unpacked tokens in 16 bits) and what the press keeps; the unpacked copy "
    "of a layer during a pass is not counted; no positions are stored"
)


@dataclass(frozen=True)
class Plan:
    """A press or cache at a budget.

    Args:
        peer: The press or cache.
        budget: Share of a sequence's length.
        slots: The same in tokens, and
        raised: whether it was raised to our smallest budget: as for our own policies.
        feeding: Tokens a forward pass.
        verdict: Why so many.
    """

    peer: Peer
    budget: float
    slots: int
    raised: bool
    feeding: int
    verdict: str

    @property
    def key(self) -> Row:
        """What names the cell in results."""
        return {"policy": self.peer.policy, "codec": self.peer.codec, "budget": self.budget}

    @property
    def task(self) -> Row:
        """What the other program is asked to do."""
        return self.peer.task(self.slots, self.feeding)


@click.command()
@click.option("--model", required=True, help="A folder or a hub id.")
@click.option(
    "--text",
    "texts",
    required=True,
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="As of `scissorhands eval perplexity`; repeatable.",
)
@click.option(
    "--press",
    "names",
    multiple=True,
    type=click.Choice([peer.name for peer in PEERS]),
    help="A press, a cache or both, as presses.py names them; repeatable.  [default: all]",
)
@click.option(
    "--budget", "budgets", multiple=True, type=float, default=[0.2], show_default=True, help="Of presses; repeatable."
)
@click.option("--sequences", type=click.IntRange(min=1), help=f"Over all texts.  [default: {NORMAL[0]}]")
@click.option("--length", type=click.IntRange(min=8), help=f"Tokens of each sequence.  [default: {NORMAL[1]}]")
@click.option("--quick", is_flag=True, help=f"{QUICK[0]} sequences of {QUICK[1]}, unless given: a first look.")
@click.option(
    "--json",
    "out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write here, and resume from it.",
)
def main(
    *,
    model: str,
    texts: tuple[Path, ...],
    names: tuple[str, ...],
    budgets: tuple[float, ...],
    sequences: int | None,
    length: int | None,
    quick: bool,
    out: Path,
) -> None:
    """Measure what kvpress and QuantizedCache cost, in the format of `scissorhands eval perplexity`."""
    default_sequences, default_length = QUICK if quick else NORMAL
    with click_errors():
        request = Request(
            model=model,
            texts=tuple(read_text(path) for path in texts),
            choices=(),
            sequences=sequences or default_sequences,
            length=length or default_length,
            quick=quick,
            dtype="float32",
            device="cpu",
            out=writable(out, "json"),
        )
        chosen = [peer for peer in PEERS if not names or peer.name in names]
        run(request, chosen, budgets, Console(stderr=True))


def run(request: Request, peers: Sequence[Peer], budgets: Sequence[float], console: Console) -> Results:
    """Measure what is missing.

    Raises:
        InvalidRequestError: Something asked for is not possible; names the option.
        PeerError: The full caches differ, or the other program cannot be run.
    """
    python = environment.prepare(console)
    setup = prepare(request)
    tokens = setup.sequences()
    results = setup.results("perplexity", bootstrap={"resamples": statistics.RESAMPLES, "seed": statistics.SEED})
    assert request.out is not None
    tell_anew(request, results.resume(request.out, full_losses), console)
    results.environment["peers"] = environment.versions()
    work = tokens.shape[0] * (tokens.shape[1] - 1)
    with tempfile.TemporaryDirectory() as folder, Runner(results, request.out, console) as runner:
        program = Program([str(python), str(PROGRAM)], Path(folder), request.model, tokens, request.dtype)
        runner.measure_full("full cache, both sides", 2 * work, lambda advance: _full(setup, tokens, program, advance))
        checks = Checks(environment.VENV / "checks.json", results.settings["weights_sha256"])
        unfit = checks.run(peers, program, console)
        fit = [peer for peer in peers if peer.name not in unfit]
        alone = [(1.0, peer) for peer in fit if not peer.press]
        # One budget after the other, so that a stopped run has compared all presses at the first.
        pressed = [(budget, peer) for budget in budgets for peer in fit if peer.press]
        for budget, peer in (*alone, *pressed):
            plan = Plan(peer, budget, *_slots(setup, budget), *checks.feeding(peer))
            cell = Cell(
                label=f"{peer.name} {budget:g}",
                key=plan.key,
                grant=grant_of(plan),
                work=work,
                measure=partial(_measure, setup, results, program, plan),
            )
            try:
                runner.measure([cell], lambda row: f"{row['increase_percent']:+.2f} %")
            except PeerError as error:
                unfit[cell.label] = str(error)
                console.print(f"{cell.label} fails: {error}", highlight=False, markup=False, soft_wrap=True)
        results.environment["peers"]["cannot_be_measured"] = unfit
        results.write(request.out)
    return results


def grant_of(plan: Plan) -> str:
    """Return all that decides what is kept, and how: a row of another grant is measured again."""
    versions = environment.versions()
    if not plan.peer.cache:
        # It packs, and does nothing else.
        del versions["optimum-quanto"]
    return json.dumps({**versions, **plan.task}, sort_keys=True)


def row_fields(plan: Plan, outcome: Row, losses: Losses, full: Losses, shape: ModelShape, dtype: torch.dtype) -> Row:
    """Return a row without its key.

    Args:
        plan: What was measured.
        outcome: The fields of ``kvpress_losses.Outcome``.
        losses: ``[sequences, length - 1]`` in nats.
        full: The same of the full cache.
        shape: The model's sizes.
        dtype: The type of weights and cache.
    """
    kept, packed = outcome["cache_bytes"] + outcome["press_bytes"], outcome["packed_bytes"]
    sizes = Sizes(kept, (kept - packed) * HALF_BYTES // outcome["element_bytes"] + packed)
    program = plan.peer.policy.partition(":")[0]
    return {
        "source": f"{program} {environment.versions()[program]}",
        "slots": plan.slots,
        "raised": plan.raised,
        **sizes.fields(shape, losses.shape[1] + 1, dtype),
        "compression_basis": PACKED_BASIS if plan.peer.cache else COMPRESSION_BASIS,
        **loss_fields(losses, outcome["first_eviction"], full),
        "press": plan.task,
        "peak_slots": outcome["peak_slots"],
        "press_bytes": outcome["press_bytes"],
        "in_order": outcome["in_order"],
        "check": plan.verdict,
    }


def agreement(ours: Losses, theirs: Losses) -> Row:
    """Return how two losses of the full cache differ.

    Raises:
        PeerError: Their means differ by more than rounding does.
    """
    means = float(np.abs(ours.mean(axis=1, dtype=np.float64) - theirs.mean(axis=1, dtype=np.float64)).max())
    if means > MOST_DIFFERENCE:
        raise PeerError(f"with the full cache, a sequence's mean loss differs by {means:.2g} nats: not the same work")
    return {"largest_mean_difference": means, "largest_difference": float(np.abs(ours - theirs).max())}


def _full(setup: Setup, tokens: Tokens, program: Program, advance: Advance) -> Row:
    ours = measure(setup.model, setup.full_grant(), tokens, advance).losses
    theirs, _ = program.measure(FULL, advance)
    return {**full_fields(ours), "peers": agreement(ours, theirs)}


def _measure(setup: Setup, results: Results, program: Program, plan: Plan, advance: Advance) -> Row:
    losses, outcome = program.measure(plan.task, advance)
    return row_fields(plan, outcome, losses, full_losses(results), setup.shape, setup.model.dtype)


def _slots(setup: Setup, budget: float) -> tuple[int, bool]:
    """Return a budget in slots as our own policies resolve it, and whether it was raised."""
    granted = setup.grant(Choice("streaming", "none", budget))
    return granted.layer_slots[0], granted.raised


if __name__ == "__main__":
    sys.exit(main())
