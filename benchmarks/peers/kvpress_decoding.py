"""Decode with kvpress's DecodingPress, a run for every line read: it runs in kvpress's own virtual environment.

``decoding.py`` starts it with a model and cases, reads one line when their caches are filled, and then writes the name
of a case for each run and reads a line when it is through. Caches are filled with random keys and values, and each case
has gone through one compression before it is measured.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

_SEED = 0


@dataclass
class Case:
    """A press, and the cache that it holds; ``decoding.describe`` makes them.

    Args:
        model: The model.
        name: Its name.
        press: Class and arguments of the press.
        buffer: Hidden states that the wrapper keeps for it.
        interval: Tokens between compressions.
        target: Tokens that a compression leaves.
        rows: Rows of the batch.
        steps: Steps of a run.
        start: Tokens that each row holds before a run.
    """

    model: Any
    name: str
    press: dict[str, Any]
    buffer: int
    interval: int
    target: int
    rows: int
    steps: int
    start: int
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        """Go through one compression, and note how much is held before it."""
        self._cache = self._filled(self.target + self.interval - 2)
        self._tokens = torch.full((self.rows, 1), 100)
        self._decode(1, done=self.interval - 2)
        self.peak_bytes = 2 * self._cache.layers[0].keys.nbytes * len(self._cache.layers)
        self.peak_bytes += self.peak_bytes // self._held  # The token of the step that compresses at its end.
        self._decode(1, done=self.interval - 1)
        if self._held != self.target:
            raise RuntimeError(f"{self.name} holds {self._held} tokens instead of {self.target}")
        self._cache = self._filled(self.start)

    @property
    def _held(self) -> int:
        return int(self._cache.layers[0].keys.shape[2])

    @torch.inference_mode()
    def run(self) -> None:
        """Decode; a run as long as the interval ends with a compression, a shorter one is forgotten."""
        self._decode(self.steps, done=0)
        if self._held > self.start:
            self._cache.crop(self.start)

    @torch.inference_mode()
    def _decode(self, steps: int, done: int) -> None:
        press = kvpress.DecodingPress(
            base_press=getattr(kvpress, self.press["class"])(**self.press["arguments"]),
            compression_interval=self.interval,
            target_size=self.target,
            hidden_states_buffer_size=self.buffer,
        )
        with press(self.model):
            for layer in range(len(self._cache.layers)):
                press.layer_step_counts[layer] = done
            for _ in range(steps):
                positions = torch.full_like(self._tokens, self._held)
                output = self.model(
                    input_ids=self._tokens, position_ids=positions, past_key_values=self._cache, use_cache=True
                )
                self._tokens = output.logits[:, -1].float().argmax(dim=-1, keepdim=True)

    def _filled(self, tokens: int) -> Any:
        config = self.model.config
        # Its types allow for caches of other kinds of layers.
        cache: Any = DynamicCache(config=config)
        generator = torch.Generator().manual_seed(_SEED)
        size = (self.rows, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
        for layer in range(config.num_hidden_layers):
            keys, values = (torch.randn(size, generator=generator).to(self.model.dtype) for _ in range(2))
            cache.update(keys, values, layer)
        return cache


def main() -> None:
    """Make the cases ready, and run one for each line."""
    request = json.loads(sys.argv[1])
    # What kvpress or transformers print must not be taken for our lines.
    lines, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Its types do not know all that the function takes.
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(
        request["model"], dtype="float32", attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False
    ).eval()
    cases = {case["name"]: Case(model, **case) for case in request["cases"]}
    print(json.dumps({name: case.peak_bytes for name, case in cases.items()}), file=lines, flush=True)
    for line in sys.stdin:
        cases[line.strip()].run()
        print("{}", file=lines, flush=True)


if __name__ == "__main__":
    main()
