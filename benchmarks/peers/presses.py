"""The presses of kvpress that are tried, as data: kvpress itself is not installed where this is read.

``DecodingPress`` compresses every ``interval`` tokens, and takes presses that score tokens (``ScorerPress``) or share a
budget between heads (``AdaKVPress``). The others are here too, so that a run says why they are missing.
"""

from dataclasses import dataclass, field
from typing import Any

# Of our own policies: how many slots they drop at once.
INTERVAL = 16
# For presses whose score is computed from the states of many past tokens, of which DecodingPress keeps only those since
# the last compression.
LONG_INTERVAL = 128


def press(kind: str, **arguments: Any) -> dict[str, Any]:
    """Describe a press by its class and the arguments that are not kvpress's defaults."""
    return {"class": kind, "arguments": arguments}


@dataclass(frozen=True)
class Peer:
    """A press and how it is applied.

    Args:
        name: What it is called here; ``@N`` says that N tokens lie between compressions, where that is not 16.
        press: See :func:`press`.
        interval: Tokens between compressions; the budget has room for them, so a longer one keeps fewer.
        buffer: Hidden states that kvpress keeps for the press; 0 where the press reads at most those of the newest.
        wrapper: The class that applies it while decoding.
        attention: transformers' name of the attention; ``eager`` returns attention weights.
    """

    name: str
    press: dict[str, Any] = field(hash=False)
    interval: int = INTERVAL
    buffer: int = 0
    wrapper: str = "DecodingPress"
    attention: str = "sdpa"

    @property
    def label(self) -> str:
        """The name in results."""
        return f"kvpress:{self.name}"

    def task(self, slots: int = 0, feeding: int = 1) -> dict[str, Any]:
        """Return it as ``kvpress_losses.py`` takes it, for a budget in slots and so many tokens a forward pass."""
        return {
            "press": self.press,
            "wrapper": self.wrapper,
            "interval": self.interval,
            "buffer": self.buffer,
            "attention": self.attention,
            "slots": slots,
            "feeding": feeding,
        }


# The full cache, to compare kvpress's side to ours.
FULL = {**Peer("full", {}).task(), "press": None}

_KNORM = press("KnormPress")
_EXPECTED = press("ExpectedAttentionPress")
# For a press that weighs by the values itself.
_EXPECTED_BARE = press("ExpectedAttentionPress", use_vnorm=False)
_STREAMING = press("StreamingLLMPress")

PEERS = (
    Peer("knorm", _KNORM),
    Peer("keydiff", press("KeyDiffPress")),
    Peer("streaming_llm", _STREAMING),
    Peer("tova", press("TOVAPress")),
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
    Peer("cam", press("TOVAPress"), wrapper="CAMPress"),
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
)
