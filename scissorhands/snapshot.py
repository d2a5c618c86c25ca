"""Snapshots: all evidence of a row at one step, and the plans that answer them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.integer]
Signal = npt.NDArray[np.generic]
Keep = npt.NDArray[np.bool_]

_LARGEST = 2**32 - 1


class TokenKind(IntEnum):
    """What a token is, whatever it means."""

    OTHER = 0
    PUNCTUATION = 1
    SPECIAL = 2


@dataclass(frozen=True)
class LayerEvidence:
    """What attention has told about the slots of one layer.

    Args:
        positions: ``[kv_heads, n]``, true position of each slot's token, ascending within a head.
        signals: By name, ``[kv_heads, n]`` each. ``mass``: attention received, in queries (float32).
            ``low_count`` and ``low_count_ring``: queries in the window that gave the slot less than the average
            (unsigned integer). ``last_attention``: attention of the newest query (float32). ``window_mass``: attention
            received from the window, in queries (float32). ``token_kind``: :class:`TokenKind` of the token (unsigned
            integer). ``expected_attention``: what the next query is expected to give the slot, as a share of its
            attention, times the norm of the slot's value (float32). ``redundancy``: mean cosine similarity of the
            slot's key to the others' (float32).
    """

    positions: Positions
    signals: dict[str, Signal]

    @property
    def length(self) -> int:
        """n, slots in use per head."""
        return int(self.positions.shape[1])


@dataclass(frozen=True)
class Snapshot:
    """The whole state of a row's evidence; never a delta.

    Args:
        epoch: Evictions applied to the row so far.
        step: Tokens that the row has seen.
        ahead: Tokens that will be appended between this snapshot and the eviction.
        incoming: Tokens that will be appended right after the eviction.
        layers: Evidence of each layer.
        prompt: Position after the last token that was read as a prompt; 0 if none was. Tokens from there on were
            decoded one by one.
    """

    epoch: int
    step: int
    ahead: int
    incoming: int
    layers: tuple[LayerEvidence, ...]
    prompt: int = 0


@dataclass(frozen=True)
class Plan:
    """Which slots of a snapshot to keep. Slots newer than the snapshot are kept without being named.

    Args:
        epoch: Epoch of the snapshot.
        step: Step of the snapshot.
        keep: Of each layer, ``[kv_heads, n]``, True for slots to keep; every head of a layer keeps equally many.
    """

    epoch: int
    step: int
    keep: tuple[Keep, ...]


def joined(layers: Sequence[LayerEvidence]) -> LayerEvidence:
    """Return the evidence of several layers as if they were one with all their heads.

    Args:
        layers: At least one, with equally many slots and the same signals.
    """
    first = layers[0]
    if len(layers) == 1:
        return first
    return LayerEvidence(
        positions=np.concatenate([layer.positions for layer in layers]),
        signals={name: np.concatenate([layer.signals[name] for layer in layers]) for name in first.signals},
    )


def pack(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the array in the smallest type that a message carries: uint8, uint16, uint32 or float32.

    Raises:
        ValueError: A whole number is beyond 32 bits or negative.
    """
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    smallest, largest = int(array.min(initial=0)), int(array.max(initial=0))
    if smallest < 0 or largest > _LARGEST:
        raise ValueError(f"evidence must be 0 to {_LARGEST}, got {smallest} to {largest}")
    return array.astype(np.min_scalar_type(largest), copy=False)
