"""A slow, dense, plainly written reference of a cache under a budget, to test the real one against.

It is written from the design, not from the code: nothing of the program is imported here. It keeps every key and value
of a sequence, and evicts by clearing a bit in a mask. It keeps the whole attention matrix, and works every signal out
anew from it whenever a decision is due. Attention is computed in float64, one query and one head at a time.
"""

import copy
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from support.dense_policies import expected_attention, fastgen, kind_of, r_kv, redundancy
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

NAME = "dense_reference"
# How near to its threshold a comparison may come, relatively, before rounding could turn it.
CLOSE = 1e-5

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rules:
    """The policy and its numbers, by the letters of the design.

    Args:
        policy: ``default`` (Scissorhands, consistent reading), ``paper``, ``h2o``, ``tova``, ``snapkv``, ``r-kv``,
            ``fastgen``, ``expected-attention`` or ``streaming``; ``protected:`` before one of them is told by ``t``,
            ``merged:`` folds what is dropped into what is kept.
        B: Slots of each layer and KV head; a tuple gives each layer its own, a tuple of tuples each of its KV heads.
        r: Newest slots that are exempt.
        s: First tokens that are exempt.
        m: Slots dropped at once.
        L: Slots between snapshot and eviction.
        c: Tokens of a prefill chunk.
        w: Queries that importance looks back on.
        t: Last tokens of the prompt that are exempt.
    """

    policy: str
    B: int | tuple[int, ...] | tuple[tuple[int, ...], ...]
    r: int
    s: int
    m: int
    L: int
    c: int
    w: int = 0
    t: int = 0

    @property
    def scored_by(self) -> str:
        """The policy that scores the slots which are not exempt."""
        return self.policy.removeprefix("protected:").removeprefix("merged:")

    @property
    def merges(self) -> bool:
        """Whether what is dropped is folded into what is kept."""
        return self.policy.startswith("merged:")


@dataclass
class DenseLayer:
    """One layer: the mask of kept tokens, and what every query ever gave every token.

    Args:
        keep: ``[kv_heads, tokens]``, whether a token is still in the cache.
        attention: ``[kv_heads, queries, tokens]``, the mean over the query heads of a group; 0 if not seen.
        seen: ``[kv_heads, queries, tokens]``, whether the query could see the token.
        scores: ``[query_heads, queries, tokens]``, scaled products of queries and keys; NaN if not seen.
        window: Tokens that a query sees, its own included, whatever is kept elsewhere; 0 for a layer under the rules.
        weights: ``[kv_heads, tokens]``, how many times its own attention a token gets for what was folded into it.
        keys: ``[kv_heads, tokens, head_dim]`` after position embedding, of all tokens.
        values: ``[kv_heads, tokens, head_dim]``, with what was folded into them.
        dropped_mass: Attention that tokens had received by the time they were dropped.
    """

    keep: Mask
    attention: Array
    seen: Mask
    scores: Array
    weights: Array
    window: int = 0
    keys: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    dropped_mass: float = 0.0


class DenseSequence:
    """One sequence of a model under rules.

    Layers with a window are outside of the rules: they see the newest tokens, and nothing is ever decided about them.

    Args:
        model: A causal language model; a copy of it is used.
        rules: The rules.
        longest: Most tokens that the sequence may have.
        windows: Of each layer, tokens that a query sees; 0: all that are kept. Nothing: no layer has a window.
    """

    def __init__(self, model: PreTrainedModel, rules: Rules, longest: int, windows: tuple[int, ...] = ()) -> None:
        self.rules = rules
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation(NAME)
        heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
        self.layers = [
            DenseLayer(
                keep=np.zeros((heads, longest), dtype=bool),
                attention=np.zeros((heads, longest, longest)),
                seen=np.zeros((heads, longest, longest), dtype=bool),
                scores=np.full((model.config.num_attention_heads, longest, longest), np.nan),
                weights=np.ones((heads, longest)),
                window=window,
            )
            for window in windows or (0,) * model.config.num_hidden_layers
        ]
        self.ruled = [layer for layer in self.layers if not layer.window]
        budgets = rules.B if isinstance(rules.B, tuple) else (rules.B,) * len(self.ruled)
        self.budgets = [each if isinstance(each, tuple) else (each,) * heads for each in budgets]
        self.step = 0
        self.prompt = 0
        self.tokens: list[int] = []
        self.evictions = 0
        self.close_calls = 0
        self._planned: list[Mask] | None = None

    @property
    def used(self) -> list[list[int]]:
        """n, slots in use of each layer under the rules and head."""
        return [layer.keep.sum(axis=1).tolist() for layer in self.ruled]

    @property
    def room(self) -> int:
        """Tokens that fit before a head is full."""
        if not self.ruled:
            return 10**9
        return min(
            budget - used
            for budgets, heads in zip(self.budgets, self.used, strict=True)
            for budget, used in zip(budgets, heads, strict=True)
        )

    def kept(self) -> list[list[list[int]]]:
        """Return the positions of the kept tokens of each layer under the rules, and head."""
        return [[np.flatnonzero(head).tolist() for head in layer.keep] for layer in self.ruled]

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read a prompt, or a part of one, along the chunk grid; return ``[tokens, vocabulary]`` logits."""
        logits = []
        while len(tokens):
            size = min(self.rules.c - self.step % self.rules.c, len(tokens))
            self._planned = None
            if self.room < size:
                self._drop(self._plan(ahead=0, incoming=size))
            logits.append(self._forward(tokens[:size]))
            self.prompt = self.step
            tokens = tokens[size:]
        return torch.cat(logits)

    def decode(self, token: torch.Tensor) -> torch.Tensor:
        """Append one token; return ``[vocabulary]`` logits."""
        if self.room == 0:
            self._drop(self._planned if self._planned is not None else self._plan(ahead=0, incoming=1))
            self._planned = None
        if self._planned is None and self.room <= self.rules.L:
            self._planned = self._plan(ahead=self.room, incoming=1)
        return self._forward(token.reshape(1))[0]

    def signals(self, layer: DenseLayer) -> dict[str, Array]:
        """Return signals by name, ``[kv_heads, tokens]``; those of a window for the policy's window.

        Those that take long to work out are there if the policy needs them.
        """
        now = self.step
        start, _ = self._window()
        low = self._low_counts(layer)
        own = {}
        if self.rules.scored_by == "r-kv":
            own["redundancy"] = redundancy(layer.keep, layer.keys)
        if self.rules.scored_by == "expected-attention":
            own["expected_attention"] = expected_attention(layer.keep, layer.scores, layer.values, now)
        if self.rules.scored_by == "fastgen":
            kinds = np.zeros(layer.keep.shape)
            kinds[:, :now] = [kind_of(token) for token in self.tokens]
            own["token_kind"] = kinds
        return own | {
            "mass": layer.attention[:, :now].sum(axis=1),
            "low_count": low,
            "low_count_ring": low,
            "last_attention": layer.attention[:, now - 1],
            "window_mass": layer.attention[:, start:now].sum(axis=1),
            "weight": np.log(layer.weights[:, :now]),
        }

    def _low_counts(self, layer: DenseLayer) -> Array:
        """Return how many queries of the window gave each token less than the average."""
        now = self.step
        start, threshold = self._window()
        queries = slice(start, now)
        seen = layer.seen[:, queries]
        # The average is one over the slots that the query saw, for the paper one over the tokens of the sequence.
        slots = seen.sum(axis=2) if threshold == "1/n" else np.arange(start, now)[None] + 1
        average = 1.0 / slots[:, :, None]
        low = (seen & (layer.attention[:, queries] < average)).sum(axis=1)
        if self.rules.scored_by in ("counts", "paper"):
            close = np.abs(layer.attention[:, queries] - average) < CLOSE * average
            self.close_calls += int((seen & close & (average < 1)).sum())
        return low.astype(float)

    def _window(self) -> tuple[int, str]:
        """Return the first query that the policy looks back on, and the average that a low count compares with."""
        if self.rules.scored_by == "paper":
            return max(0, self.step - self.rules.w), "1/t"
        if self.rules.scored_by in ("counts", "snapkv", "r-kv"):
            # Two buckets of half a window take turns, by the query's position; a bucket is emptied when its turn comes.
            half = self.rules.w // 2
            newest = self.step - 1
            return max(0, newest - newest % half - half), "1/n"
        return 0, "1/n"

    def _scores(self, layer: DenseLayer) -> Array:
        """Return ``[kv_heads, tokens]``; the lowest are dropped first."""
        signals = self.signals(layer)
        start, _ = self._window()
        positions = np.arange(layer.keep.shape[1])
        match self.rules.scored_by:
            case "streaming":
                scores = np.broadcast_to(positions.astype(float), layer.keep.shape)
            case "h2o":
                scores = signals["mass"]
            case "tova":
                scores = signals["last_attention"]
            case "snapkv":
                scores = self._pooled(layer, signals["window_mass"])
            case "r-kv":
                importance = self._pooled(layer, signals["window_mass"] / (self.step - start))
                scores = r_kv(layer.keep, importance, signals["redundancy"])
            case "fastgen":
                scores = fastgen(layer.keep, signals["mass"], signals["token_kind"])
            case "expected-attention":
                scores = signals["expected_attention"]
            case "paper":
                scores = -signals["low_count"]
            case "default":
                # A token was seen by its own query and all after it.
                scores = signals["mass"] / np.array([max(1, self.step - position) for position in positions])
            case "counts":
                observed = np.array([max(1, self.step - max(position, start)) for position in positions])
                scores = -signals["low_count"] / observed
        return scores

    @staticmethod
    def _pooled(layer: DenseLayer, mass: Array) -> Array:
        """Return for each kept token the largest mass among itself and the three kept tokens on either side."""
        scores = np.zeros_like(mass)
        for head, keep in enumerate(layer.keep):
            tokens = np.flatnonzero(keep).tolist()
            for slot, token in enumerate(tokens):
                scores[head, token] = max(mass[head, near] for near in tokens[max(0, slot - 3) : slot + 4])
        return scores

    def _plan(self, ahead: int, incoming: int) -> list[Mask]:
        """Return the tokens to drop of each layer and head, from what is known now."""
        rules = self.rules
        plans = []
        for layer, budgets in zip(self.ruled, self.budgets, strict=True):
            scores = self._scores(layer)
            plan = np.zeros_like(layer.keep)
            for head, (keep, budget) in enumerate(zip(layer.keep, budgets, strict=True)):
                slots = np.flatnonzero(keep).tolist()
                used = len(slots)
                overflow = used + ahead + incoming - budget
                # Where the budget is too small for r recent slots, there are as many as it leaves room for.
                recent = min(rules.r, max(0, budget - rules.s - rules.t - max(rules.m, rules.c)))
                # A head that is not full yet drops along if it would be before m more tokens.
                spare = used + ahead - rules.s - rules.t - max(recent, rules.L)
                count = max(overflow, min(rules.m, spare), 0) if overflow + rules.m - 1 > 0 else 0
                newest = max(0, recent - ahead)
                exempt = {position for position in slots if position < rules.s} | set(slots[len(slots) - newest :])
                exempt |= {position for position in slots if self.prompt - rules.t <= position < self.prompt}
                # Lowest score first; of equal scores the older.
                candidates = sorted((scores[head, position], position) for position in slots if position not in exempt)
                assert len(candidates) >= count, "the budget is too small for these rules"
                if rules.scored_by not in ("counts", "paper", "streaming") and 0 < count < len(candidates):
                    last, first = candidates[count - 1][0], candidates[count][0]
                    # Tokens that share their largest neighbor tie exactly, here as there.
                    self.close_calls += 0 < first - last < CLOSE * abs(last)
                for _, position in candidates[:count]:
                    plan[head, position] = True
            plans.append(plan)
        return plans

    def _drop(self, plan: list[Mask]) -> None:
        for layer, drop in zip(self.ruled, plan, strict=True):
            layer.dropped_mass += float(layer.attention[:, : self.step].sum(axis=1)[drop].sum())
            layer.keep &= ~drop
            if self.rules.merges:
                for head in range(len(drop)):
                    self._fold(layer, head, np.flatnonzero(drop[head]).tolist())
        self.evictions += 1

    def _fold(self, layer: DenseLayer, head: int, dropped: list[int]) -> None:
        """Fold dropped tokens of a head into the kept ones with the nearest keys, if those are near."""
        keys, values = layer.keys[head].double().numpy(), layer.values[head].double().numpy()
        rate = [layer.attention[head, : self.step, token].sum() / (self.step - token) for token in range(self.step)]
        kept_tokens, taken = np.flatnonzero(layer.keep[head]).tolist(), dict[int, list[int]]()
        far = np.sqrt(((keys[kept_tokens] - keys[kept_tokens].mean(axis=0)) ** 2).sum(axis=1).mean())
        for token in dropped:
            distance, nearest = min((np.linalg.norm(keys[kept] - keys[token]), kept) for kept in kept_tokens)
            if distance < far:
                taken.setdefault(nearest, [nearest]).append(token)
        layer.values = layer.values.clone()
        for kept, tokens in taken.items():
            total = sum(rate[token] for token in tokens)
            mean = sum(rate[token] * values[token] for token in tokens) / total
            layer.values[head, kept] = torch.from_numpy(mean)
            layer.weights[head, kept] *= min(20, total / rate[kept])

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        end = self.step + len(tokens)
        self.tokens += tokens.tolist()
        for layer in self.layers:
            layer.keep[:, self.step : end] = True
        positions = torch.arange(self.step, end).unsqueeze(0)
        logits = self.model(
            input_ids=tokens.unsqueeze(0), position_ids=positions, cache=_DenseCache(self), use_cache=True
        ).logits[0]
        self.step = end
        return logits


class _DenseCache(Cache):
    """Hands all keys and values of a sequence to attention; evicts nothing."""

    running: DenseSequence

    def __init__(self, sequence: DenseSequence) -> None:
        super().__init__(layers=[])
        self._sequence = sequence

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _DenseCache.running = self._sequence
        layer = self._sequence.layers[layer_idx]
        layer.keys = torch.cat([layer.keys, key_states[0]], dim=1) if len(layer.keys) else key_states[0]
        layer.values = torch.cat([layer.values, value_states[0]], dim=1) if len(layer.values) else value_states[0]
        return layer.keys.unsqueeze(0), layer.values.unsqueeze(0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._sequence.step

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._sequence.step + query_length, 0


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one sequence over the tokens that are kept, one query and head at a time."""
    layer = _DenseCache.running.layers[module.layer_idx]
    queries, keys, values = (states[0].double().numpy() for states in (query, key, value))
    group = len(queries) // len(keys)
    first = keys.shape[1] - queries.shape[1]
    output = np.zeros_like(queries)
    for head in range(len(queries)):
        kv_head = head // group
        for index in range(queries.shape[1]):
            position = first + index
            tokens = slice(0, position + 1)
            seen = layer.keep[kv_head, tokens].copy()
            if layer.window:
                seen[: max(0, position + 1 - layer.window)] = False
            scores = keys[kv_head, tokens] @ queries[head, index] * scaling + np.log(layer.weights[kv_head, tokens])
            scores = np.where(seen, scores, -np.inf)
            layer.scores[head, position, tokens] = np.where(seen, scores, np.nan)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            output[head, index] = weights @ values[kv_head, tokens]
            layer.attention[kv_head, position, tokens] += weights / group
            layer.seen[kv_head, position, tokens] = seen
    return torch.from_numpy(output).to(query.dtype).transpose(0, 1).unsqueeze(0), None


def no_mask(*args: object, **kwargs: object) -> None:
    """Return no mask: the reference keeps its own."""


AttentionInterface.register(NAME, dense_attention)
AttentionMaskInterface.register(NAME, no_mask)
