"""The presses and caches that are tried, as data: neither kvpress nor its transformers is installed where this is read.

``DecodingPress`` compresses every ``interval`` tokens, and takes presses that score tokens (``ScorerPress``) or share a
budget between heads (``AdaKVPress``). The others are here too, so that a run says why they are missing.

transformers' ``QuantizedCache`` packs tokens and holds the newest of them, its residual, unpacked. It is tried
alone and under a press.
"""

from dataclasses import dataclass, field
from typing import Any

# Of our own policies: how many slots they drop at once.
INTERVAL = 16
# For presses whose score is computed from the states of many past tokens, of which DecodingPress keeps only those since
# the last compression.
LONG_INTERVAL = 128
# The default of QuantizedCache: tokens that wait unpacked, until all are packed anew.
RESIDUAL = 128


def press(kind: str, **arguments: Any) -> dict[str, Any]:
    """Describe a press by its class and the arguments that are not kvpress's defaults."""
    return {"class": kind, "arguments": arguments}


def quantized(bits: int, axis_key: int = 0, residual: int = RESIDUAL) -> dict[str, Any]:
    """Return arguments of ``QuantizedCache``, which are its defaults but for those of this function.

    Args:
        bits: 2 or 4.
        axis_key: 0 gives 64 numbers in a row one scale: at head_dim 64, those of a key. -1 gives it to 64 tokens of a
            channel; then tokens are packed in multiples of 64.
        residual: Tokens that wait unpacked.
    """
    return {
        "backend": "quanto",
        "nbits": bits,
        "axis_key": axis_key,
        "axis_value": 0,
        "q_group_size": 64,
        "residual_length": residual,
    }


@dataclass(frozen=True)
class Peer:
    """A press and how it is applied, or a cache that no press holds.

    Args:
        name: What it is called here: the press, the codec, or both with ``+``; ``@N`` says that N tokens lie between
            compressions, where that is not 16.
        press: See :func:`press`; None evicts nothing.
        interval: Tokens between compressions; the budget has room for them, so a longer one keeps fewer.
        buffer: Hidden states that kvpress keeps for the press; 0 where the press reads at most those of the newest.
        wrapper: The class that applies it while decoding.
        attention: transformers' name of the attention; ``eager`` returns attention weights.
        codec: What tokens are stored in, as results name it.
        cache: See :func:`quantized`; None stores them exactly.
        prompt: Tokens of the first forward pass.
    """

    name: str
    press: dict[str, Any] | None = field(hash=False)
    interval: int = INTERVAL
    buffer: int = 0
    wrapper: str = "DecodingPress"
    attention: str = "sdpa"
    codec: str = "none"
    cache: dict[str, Any] | None = field(default=None, hash=False)
    prompt: int = 1

    @property
    def policy(self) -> str:
        """The policy in results: the program and what evicts."""
        return f"kvpress:{self.name.removesuffix(f'+{self.codec}')}" if self.press else "transformers:full"

    def task(self, slots: int = 0, feeding: int = 1) -> dict[str, Any]:
        """Return it as ``kvpress_losses.py`` takes it, for a budget in slots and so many tokens a forward pass."""
        # Rows that no such cache concerns stay those of the same task.
        stored = {"cache": self.cache, "prompt": self.prompt} if self.cache else {}
        return {
            "press": self.press,
            "wrapper": self.wrapper,
            "interval": self.interval,
            "buffer": self.buffer,
            "attention": self.attention,
            "slots": slots,
            "feeding": feeding,
            **stored,
        }


# The full cache, to compare kvpress's side to ours.
FULL = Peer("full", None).task()

_KNORM = press("KnormPress")
_EXPECTED = press("ExpectedAttentionPress")
# For a press that weighs by the values itself.
_EXPECTED_BARE = press("ExpectedAttentionPress", use_vnorm=False)
_STREAMING = press("StreamingLLMPress")
_TOVA = press("TOVAPress")
_QUANTIZED4, _QUANTIZED2 = quantized(4), quantized(2)

PEERS = (
    Peer("knorm", _KNORM),
    Peer("keydiff", press("KeyDiffPress")),
    Peer("streaming_llm", _STREAMING),
    Peer("tova", _TOVA),
    Peer("lagkv", press("LagKVPress")),
    Peer("cur", press("CURPress")),
    Peer("random", press("RandomPress", seed=0)),
    # The window must be smaller than the interval; its default is 64.
    Peer("snapkv", press("SnapKVPress", window_size=8), buffer=INTERVAL),
    Peer("snapkv@128", press("SnapKVPress"), interval=LONG_INTERVAL, buffer=LONG_INTERVAL),
    Peer("pyramidkv@128", press("PyramidKVPress"), interval=LONG_INTERVAL, buffer=LONG_INTERVAL),
    Peer("expected_attention", _EXPECTED, buffer=INTERVAL),
    Peer("expected_attention@128", _EXPECTED, interval=LONG_INTERVAL, buffer=LONG_INTERVAL),
    Peer("cap", press("CapPress"), buffer=INTERVAL),
    Peer("cap@128", press("CapPress"), interval=LONG_INTERVAL, buffer=LONG_INTERVAL),
    Peer("criticalkv", press("CriticalKVPress", press=_EXPECTED_BARE), buffer=INTERVAL),
    Peer("cam", _TOVA, wrapper="CAMPress"),
    Peer("observed_attention", press("ObservedAttentionPress"), attention="eager"),
    Peer("adakv", press("AdaKVPress", press=_KNORM)),
    Peer("leverage", press("LeverageScorePress"), buffer=INTERVAL),
    Peer("non_causal_attention", press("NonCausalAttnPress"), buffer=INTERVAL),
    Peer("compactor", press("CompactorPress"), buffer=INTERVAL),
    Peer("key_rerotation", press("KeyRerotationPress", press=_STREAMING)),
    Peer("merging", press("MergingPress", press=_KNORM)),
    Peer("block", press("BlockPress", press=press("KeyDiffPress"))),
    Peer("chunk", press("ChunkPress", press=_KNORM)),
    Peer("chunkkv", press("ChunkKVPress", press=_KNORM)),
    Peer("entropy_gated_chunkkv", press("EntropyGatedChunkKVPress", press=_KNORM)),
    Peer("critical_adakv", press("CriticalAdaKVPress", press=_KNORM)),
    Peer("dms", press("DMSPress", press=_KNORM, threshold=-10.0, decoding=True)),
    Peer("think", press("ThinKPress")),
    Peer("simlayerkv", press("SimLayerKVPress")),
    Peer("finch", press("FinchPress")),
    Peer("duo_attention", press("DuoAttentionPress")),
    Peer("kvzip", press("KVzipPress")),
    Peer("kvcompose", press("KVComposePress")),
    Peer("lukv", press("LUKVPress")),
    Peer("fastkvzip", press("FastKVzipPress")),
    # Their weights are trained for certain models and fetched at run time.
    Peer("qfilter", press("QFilterPress")),
    Peer("kvzap", press("KVzapPress")),
    Peer("expected_attention_stats", press("ExpectedAttentionStatsPress")),
    # For a cache alone, the interval only says when it packs.
    Peer("quantized4", None, interval=RESIDUAL, codec="quantized4", cache=_QUANTIZED4),
    Peer("quantized2", None, interval=RESIDUAL, codec="quantized2", cache=_QUANTIZED2),
    # Keys by channel and values by token, as in KIVI (arXiv 2402.02750).
    Peer(
        "quantized4-channels", None, interval=RESIDUAL, codec="quantized4-channels", cache=quantized(4, -1), prompt=64
    ),
    Peer(
        "quantized2-channels", None, interval=RESIDUAL, codec="quantized2-channels", cache=quantized(2, -1), prompt=64
    ),
    # DecodingPress reads packed tokens only and drops the residual: it loses nothing where that is empty each time.
    Peer("tova+quantized4", _TOVA, codec="quantized4", cache=_QUANTIZED4),
    Peer("tova@128+quantized4", _TOVA, interval=RESIDUAL, codec="quantized4", cache=_QUANTIZED4),
    Peer("tova@128+quantized2", _TOVA, interval=RESIDUAL, codec="quantized2", cache=_QUANTIZED2),
    Peer("tova+quantized4-r16", _TOVA, codec="quantized4-r16", cache=quantized(4, residual=INTERVAL)),
)
