"""Measure kvpress and QuantizedCache: the losses of sequences while a press holds the cache, or it is packed, or both.

It runs in kvpress's own virtual environment. ``run.py`` starts it with ``check`` or ``measure`` and the path of a
request, and reads one JSON object a line from its standard output. ``check`` finds out which presses and caches work at
all, and which of them can be fed in blocks; ``measure`` writes the losses of one of them.

Sequences are decoded as one batch, teacher-forced. kvpress takes the first forward pass for the prompt and does not
compress after it, so the first token comes alone, unless a task says otherwise.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache
from transformers.utils import logging as transformers_logging

# Blocks of the full cache; the size changes nothing.
FULL_BLOCK = 64
# The check needs no good model: so many layers of it, of so many sequences, and so many slots and tokens, as multiples
# of the interval.
CHECK_LAYERS = 3
CHECK_SEQUENCES = 2
CHECK_SLOTS = 2
CHECK_TOKENS = 4
# Nats. In float64 rounding decides no eviction, and equal caches give losses that differ by less.
EQUAL = 1e-4
# What presses raise where they do not work.
FAILURES = (AssertionError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, OSError)

Message = dict[str, Any]
Tell = Callable[[Message], None]


@dataclasses.dataclass(frozen=True)
class Task:
    """A press and how it is applied; ``presses.py`` lists them.

    Args:
        press: Class and arguments of the press; None evicts nothing.
        wrapper: Class that applies the press while decoding: DecodingPress or one derived from it.
        interval: Tokens between compressions.
        buffer: Hidden states that the wrapper keeps for the press.
        attention: transformers' name of the attention.
        slots: Most tokens that a layer may hold on average, at the moment before a compression.
        feeding: Tokens a forward pass: 1, or the interval where that was checked to change no loss; see :attr:`passes`.
        cache: Arguments of ``QuantizedCache``; None stores tokens exactly.
        prompt: Tokens of the first forward pass.
    """

    press: dict[str, Any] | None
    wrapper: str
    interval: int
    buffer: int
    attention: str
    slots: int = 0
    feeding: int = 1
    cache: dict[str, Any] | None = None
    prompt: int = 1

    @property
    def passes(self) -> list[int]:
        """Sizes of the forward passes from one compression to the next."""
        if not self.press and not self.cache:
            return [FULL_BLOCK]
        if self.feeding == 1:
            return [1] * self.interval
        # A quantized layer packs if it held one token less than its residual before the pass: the last comes alone.
        return [self.interval - 1, 1] if self.cache else [self.interval]


@dataclasses.dataclass
class Outcome:
    """What was measured, beside the losses.

    Args:
        first_eviction: Tokens seen at the first eviction; None if nothing was evicted.
        peak_slots: Tokens held by a layer before a compression, the mean of layers, the most over time.
        cache_bytes: Of a sequence, keys and values at ``peak_slots``; of a quantized cache, the most that its tensors
            took between two passes.
        packed_bytes: Of these, integers, which take the same in any number type.
        press_bytes: Of a sequence, the most that the press keeps between passes: hidden states, sums of attention.
        element_bytes: Of one number of the cache.
        in_order: Whether kept tokens stay in the order in which they came.
    """

    first_eviction: int | None = None
    peak_slots: float = 0.0
    cache_bytes: int = 0
    packed_bytes: int = 0
    press_bytes: int = 0
    element_bytes: int = 0
    in_order: bool = True


class Watch:
    """Observes what a press is given and returns, layer by layer.

    Args:
        press: The wrapper; its ``compress`` is observed from now on.
        buffered: Whether it keeps hidden states between passes.
    """

    def __init__(self, press: Any, *, buffered: bool) -> None:
        self._press = press
        self._buffered = buffered
        self._compress = press.compress
        # Bytes by attribute and layer.
        self._held: dict[tuple[str, int], int] = {}
        self.in_order = True
        press.compress = self._observe

    @property
    def held_bytes(self) -> int:
        """The sum over layers of the most bytes that each kept, of all sequences."""
        return sum(self._held.values())

    def _observe(self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        layer = module.layer_idx
        for name, kept in vars(self._press).items():
            # The states of the current pass are there even if none are kept after it.
            if isinstance(kept, dict) and (self._buffered or name != "hidden_states_buffer"):
                size = _tensor_bytes(kept.get(layer))
                self._held[name, layer] = max(self._held.get((name, layer), 0), size)
        result = self._compress(module, hidden, keys, values, attentions, kwargs)
        # One head of one layer is enough, since all presses share the selection.
        self.in_order = self.in_order and (layer > 0 or _in_order(keys[0, 0], result[0][0, 0]))
        return result


def main() -> None:
    """Do what the request asks for."""
    command, path = sys.argv[1:]
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    # What kvpress or transformers print must not be taken for our lines.
    lines, sys.stdout = sys.stdout, sys.stderr

    def tell(message: Message) -> None:
        print(json.dumps(message), file=lines, flush=True)

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # That a check leaves out layers is no news.
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    tokens = torch.from_numpy(np.load(request["tokens"], allow_pickle=False))
    if command == "check":
        check(request["model"], tokens, [Task(**each) for each in request["tasks"]], tell)
    else:
        task = Task(**request["task"])
        losses, outcome = measure(load(request["model"], request["dtype"], task), tokens, task, tell)
        np.save(request["losses"], losses.numpy().astype("<f4"))
        tell({"outcome": dataclasses.asdict(outcome)})


def load(model: str, dtype: str, task: Task, **config: Any) -> Any:
    """Load a model with the attention that a press needs; ``config`` overrides its configuration."""
    # Its types do not know all that the function takes.
    loader: Any = AutoModelForCausalLM
    loaded = loader.from_pretrained(
        model, dtype=dtype, attn_implementation=task.attention, use_safetensors=True, trust_remote_code=False, **config
    )
    return loaded.eval()


def build(task: Task, target: int) -> Any:
    """Return the wrapper around a press."""
    assert task.press is not None
    return getattr(kvpress, task.wrapper)(
        base_press=_build(task.press),
        # kvpress counts forward passes.
        compression_interval=len(task.passes),
        target_size=target,
        hidden_states_buffer_size=task.buffer,
    )


def check(model: str, tokens: torch.Tensor, tasks: list[Task], tell: Tell) -> None:
    """Tell of each task its ``error``, or its ``feeding`` and why (``verdict``).

    It runs in float64: where two scores are nearly equal, rounding decides which token stays, and rounding differs
    between one token at a time and a block, so that losses in float32 differ though the rule is the same.
    """
    models: dict[str, Any] = {}
    for task in tasks:
        try:
            if task.press:
                build(task, target=task.interval)
            if task.attention not in models:
                models = {task.attention: load(model, "float64", task, num_hidden_layers=CHECK_LAYERS)}
            tell(_check(models[task.attention], tokens, task))
        except FAILURES as error:
            tell({"error": _reason(error)})


def measure(model: Any, tokens: torch.Tensor, task: Task, tell: Tell) -> tuple[torch.Tensor, Outcome]:
    """Measure sequences, and tell how many tokens are ``done``.

    Args:
        model: The model.
        tokens: ``[sequences, length]``.
        task: What holds the cache.
        tell: Takes the messages.

    Returns:
        Losses ``[sequences, length - 1]`` in nats, and the rest.

    Raises:
        RuntimeError: More tokens are held than the task allows, or fewer, or the losses are not finite.
    """
    # Its types allow for caches of other kinds of layers.
    cache: Any = QuantizedCache(config=model.config, **task.cache) if task.cache else DynamicCache(config=model.config)
    press = build(task, task.slots - task.interval) if task.press else None
    watch = Watch(press, buffered=task.buffer > 0) if press else None
    outcome = Outcome()
    parts = []
    layers = cache.layers
    with press(model) if press else nullcontext():
        for start, size in _blocks(tokens.shape[1] - 1, chain([task.prompt], cycle(task.passes))):
            before = _held(layers)
            parts.append(_forward(model, cache, tokens, start, size))
            tell({"done": parts[-1].numel()})
            seen, peak, left = start + size, before + size, _held(layers)
            outcome.peak_slots = max(outcome.peak_slots, peak)
            if press and outcome.peak_slots > task.slots:
                raise RuntimeError(f"holds {outcome.peak_slots:g} tokens a layer, {task.slots} are allowed")
            if task.cache:
                if press and left < min(seen, press.target_size):
                    raise RuntimeError(
                        f"holds {left:g} of {seen} tokens a layer, {press.target_size} were to stay: "
                        "the press drops those that are not packed yet"
                    )
                sizes = _stored_bytes(layers, len(tokens))
            else:
                sizes = (round(peak * len(layers)) * _slot_bytes(layers[0]), 0)
            outcome.cache_bytes, outcome.packed_bytes = max((outcome.cache_bytes, outcome.packed_bytes), sizes)
            outcome.element_bytes = layers[0].keys.element_size()
            if outcome.first_eviction is None and any(layer.get_seq_length() < seen for layer in layers):
                outcome.first_eviction = seen
    if watch:
        outcome.press_bytes, outcome.in_order = watch.held_bytes // len(tokens), watch.in_order
    return torch.cat(parts, dim=1), outcome


def _build(press: dict[str, Any]) -> Any:
    """Return a press from its class and arguments; an argument may be a press again."""
    arguments = {
        name: _build(value) if isinstance(value, dict) else value for name, value in press["arguments"].items()
    }
    return getattr(kvpress, press["class"])(**arguments)


def _check(model: Any, tokens: torch.Tensor, task: Task) -> Message:
    few = tokens[:CHECK_SEQUENCES, : CHECK_TOKENS * task.interval + 1]
    short = dataclasses.replace(task, slots=CHECK_SLOTS * task.interval)

    def run(feeding: int) -> torch.Tensor:
        return measure(model, few, dataclasses.replace(short, feeding=feeding), lambda _: None)[0]

    one_by_one = run(1)
    try:
        difference = float((run(task.interval) - one_by_one).abs().max())
    except FAILURES as error:
        return {"feeding": 1, "verdict": f"blocks fail: {_reason(error)}"}
    verdict = f"fed in blocks, losses of {few.numel()} tokens in float64 differ by at most {difference:.2g} nats"
    return {"feeding": task.interval if difference <= EQUAL else 1, "verdict": verdict}


def _blocks(total: int, sizes: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and the size of each block; the last may be cut short."""
    start = 0
    while start < total:
        taken = min(next(sizes), total - start)
        yield start, taken
        start += taken


@torch.inference_mode()
def _forward(model: Any, cache: Any, tokens: torch.Tensor, start: int, size: int) -> torch.Tensor:
    # Positions are the true ones. The mask is made from the number of tokens held, so a block sees all that is kept,
    # and itself causally.
    positions = torch.arange(start, start + size).expand(len(tokens), size)
    block = tokens[:, start : start + size]
    logits = model(input_ids=block, position_ids=positions, past_key_values=cache, use_cache=True).logits
    targets = tokens[:, start + 1 : start + 1 + size]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    if not losses.isfinite().all():
        raise RuntimeError(f"losses are not finite after {start} tokens")
    return losses.view(targets.shape)


def _held(layers: list[Any]) -> float:
    """Return how many tokens a layer holds, the mean of layers."""
    tokens: int = sum(layer.get_seq_length() for layer in layers)
    return tokens / len(layers)


def _stored_bytes(layers: list[Any], sequences: int) -> tuple[int, int]:
    """Return what quantized layers take in memory, by sequence: all bytes, and those of integers."""
    kept = [plain for layer in layers for held in vars(layer).values() for plain in _plain(held)]
    packed = [tensor for tensor in kept if not tensor.dtype.is_floating_point]
    every, integers = (sum(tensor.untyped_storage().nbytes() for tensor in each) for each in (kept, packed))
    return every // sequences, integers // sequences


def _plain(held: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that something consists of: a packed one has numbers, scales and shifts."""
    if is_traceable_wrapper_subclass(held):
        names, _ = held.__tensor_flatten__()
        for name in names:
            yield from _plain(getattr(held, name))
    elif isinstance(held, torch.Tensor):
        yield held


def _slot_bytes(layer: Any) -> int:
    """Return the bytes of one token of one sequence, keys and values of a layer."""
    return sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in (layer.keys, layer.values))


def _tensor_bytes(kept: Any) -> int:
    if isinstance(kept, torch.Tensor):
        return kept.numel() * kept.element_size()
    return sum(_tensor_bytes(each) for each in kept) if isinstance(kept, list) else 0


def _in_order(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether ``after`` ``[kept, head_dim]`` holds rows of ``before`` ``[slots, head_dim]`` in their order."""
    origins = (after[:, None, :] == before[None, :, :]).all(dim=-1).int().argmax(dim=1)
    return bool((origins.diff() > 0).all())


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
