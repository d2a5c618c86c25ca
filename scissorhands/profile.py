"""Profiles: what eviction costs in each KV head of a model, and budgets shared between the heads by it.

A few heads look far back and need most of what they have seen; most heads do well with a tenth. ``scissorhands
calibrate`` measures it once for a model. At equal bytes, heads then get slots where they save the most: the sum of the
measured losses is minimized, by the lower convex hull of each head's curve (Everett 1963, generalized Lagrange
multipliers; bit allocation in coding does the same: Shoham and Gersho 1988).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scissorhands.errors import InvalidRequestError

FILE_NAME = "scissorhands-profile.json"
_FORMAT = 1
# Budgets that are tried for each head, evenly spaced; between them the best two are mixed.
_STEPS = 64
# A head's share never falls below this part of an equal one: chunks and recent slots need room in every head.
LEAST_SHARE = 0.5
# Bits of the codec klt whose losses are measured.
KEY_BITS = (2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0)
VALUE_BITS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0)
# Losses below this, in nats per token, are taken for this: logarithms need a floor, and no head is worth nothing.
_NO_LOSS = 1e-9
# Without a length to be a share of, a budget is a share of this many times itself.
_UNKNOWN_LENGTH = 5
# More than any model has; a file or a message is checked against it before anything is computed.
MAX_NUMBERS = 1 << 20
MAX_SHARES = 64


@dataclass(frozen=True)
class Profile:
    """What eviction costs in each KV head.

    Args:
        model: Digest of the model's weights; empty if unknown.
        shares: Budgets as shares of the sequence's length, rising, in (0, 1).
        losses: ``[layers][kv_heads][shares]``, expected rise of the loss in nats per token when that head alone evicts.
        bits: ``[layers][kv_heads][len(KEY_BITS) + len(VALUE_BITS)]``, the same when that head's keys, or its values,
            are stored in so many bits and nothing is evicted; nothing if that was not measured.

    Raises:
        InvalidRequestError: The numbers do not make a profile.
    """

    model: str
    shares: tuple[float, ...]
    losses: tuple[tuple[tuple[float, ...], ...], ...]
    bits: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        if not 1 < len(self.shares) <= MAX_SHARES or any(not 0 < share < 1 for share in self.shares):
            raise InvalidRequestError("profile.shares", f"must be 2 to {MAX_SHARES} numbers between 0 and 1")
        if list(self.shares) != sorted(set(self.shares)):
            raise InvalidRequestError("profile.shares", "must rise")
        sizes = {(len(layer), len(head)) for layer in self.losses for head in layer}
        if len(sizes) != 1 or next(iter(sizes))[1] != len(self.shares):
            raise InvalidRequestError("profile.losses", "must have one number for each layer, KV head and share")
        if any(not 0 <= loss < math.inf for layer in self.losses for head in layer for loss in head):
            raise InvalidRequestError("profile.losses", "must be finite numbers of at least 0")
        found = [[len(head) for head in layer] for layer in self.bits]
        if self.bits and found != [[len(KEY_BITS) + len(VALUE_BITS)] * len(layer) for layer in self.losses]:
            raise InvalidRequestError("profile.bits", "must have a number for each layer, KV head and number of bits")
        if any(not 0 <= loss < math.inf for layer in self.bits for head in layer for loss in head):
            raise InvalidRequestError("profile.bits", "must be finite numbers of at least 0")

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.losses)

    @property
    def kv_heads(self) -> int:
        """KV heads of each layer."""
        return len(self.losses[0])

    def check_size(self, layers: int, kv_heads: int) -> None:
        """Refuse to be used for a model of another size.

        Raises:
            InvalidRequestError: The model has other layers or KV heads.
        """
        if (self.layers, self.kv_heads) != (layers, kv_heads):
            raise InvalidRequestError(
                "profile",
                f"must be of {layers} layers of {kv_heads} KV heads; "
                f"this one is of {self.layers} of {self.kv_heads}: calibrate this model",
            )

    @classmethod
    def of(
        cls,
        model: str,
        shares: list[float],
        losses: list[float],
        layers: int,
        kv_heads: int,
        bits: Sequence[float] = (),
    ) -> "Profile":
        """Return a profile from its losses in one row, layer by layer and head by head, and from those of bits alike.

        Raises:
            InvalidRequestError: The numbers do not make a profile of that size.
        """
        if len(losses) > MAX_NUMBERS or len(losses) != layers * kv_heads * len(shares):
            raise InvalidRequestError("profile.losses", f"must be {layers} x {kv_heads} x {len(shares)} numbers")
        widths = len(KEY_BITS) + len(VALUE_BITS)
        if bits and len(bits) != layers * kv_heads * widths:
            raise InvalidRequestError("profile.bits", f"must be {layers} x {kv_heads} x {widths} numbers, or none")
        evicting, storing = (_table(numbers, layers, kv_heads) for numbers in (losses, bits))
        return cls(model, tuple(shares), evicting, storing)

    @classmethod
    def find(cls, model: str, path: Path | None = None) -> "Profile | None":
        """Return the profile of a model: of ``path`` if given, else what lies in the model's folder; None if nothing.

        Raises:
            InvalidRequestError: The file cannot be read or holds something else.
        """
        beside = Path(model).expanduser() / FILE_NAME
        if path is None and not beside.is_file():
            return None
        return cls.load(path or beside)

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read a profile.

        Raises:
            InvalidRequestError: The file cannot be read or holds something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise InvalidRequestError("profile", f"{path} has format {content['format']}, not {_FORMAT}")
            losses, bits = (
                tuple(tuple(tuple(map(float, head)) for head in layer) for layer in content.get(name, []))
                for name in ("losses", "bits")
            )
            return cls(str(content["model"]), tuple(map(float, content["shares"])), losses, bits)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError("profile", f"cannot read {path}: {error}") from error

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Write a profile.

        Args:
            path: Where to.
            about: How it was measured: command, texts, policy, environment.
        """
        losses, bits = (
            [[[float(f"{loss:.4g}") for loss in head] for head in layer] for layer in table]
            for table in (self.losses, self.bits)
        )
        content = {
            "format": _FORMAT, "model": self.model, "about": about, "shares": list(self.shares), "losses": losses,
            "bits": bits,
        }  # fmt: skip
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def _table(numbers: Sequence[float], layers: int, kv_heads: int) -> tuple[tuple[tuple[float, ...], ...], ...]:
    rows = np.array(numbers, dtype=np.float64).reshape(layers, kv_heads, -1).tolist() if numbers else []
    return tuple(tuple(tuple(head) for head in layer) for layer in rows)


@lru_cache(maxsize=256)
def share_out(profile: Profile, heads: tuple[int, ...], slots: int, least: int, total_tokens: int | None) -> list[int]:
    """Share slots between KV heads so that the sum of their measured losses is least.

    Args:
        profile: The losses.
        heads: The heads that share, as indices layer by layer.
        slots: B, slots for each head if all get as much.
        least: The fewest slots of any head.
        total_tokens: The sequence's length, which no head needs more than; None if unknown.

    Returns:
        Slots of each of ``heads``; together at most ``slots`` times their number, and less by fewer than one a head.
    """
    total = total_tokens or slots * _UNKNOWN_LENGTH
    low = max(least, math.ceil(slots * LEAST_SHARE))
    if low >= slots or slots >= total:
        return [slots] * len(heads)
    sizes = np.unique(np.linspace(low, total, _STEPS).astype(np.int64))
    curves = losses_at(profile, heads, sizes / total)
    # Pieces of the convex hulls of all heads, the steepest first: no other choice of equal size saves more.
    pieces: list[tuple[float, int, int]] = []
    for head, curve in enumerate(curves):
        pieces += [(slope, head, size) for slope, size in hull(sizes, curve)]
    pieces.sort(key=lambda piece: piece[0])
    given = np.full(len(heads), low)
    left = slots * len(heads) - low * len(heads)
    for _, head, size in pieces:
        taken = min(size, left)
        given[head] += taken
        left -= taken
        if left == 0:
            break
    return [int(number) for number in given]


def losses_at(profile: Profile, heads: tuple[int, ...], shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ``[heads, shares]``: losses between and beyond the measured shares, straight lines in logarithms."""
    known = np.log(np.array([*profile.shares, 1.0]))
    table = np.array(profile.losses).reshape(-1, len(profile.shares))[list(heads)]
    table = np.log(np.maximum(np.pad(table, ((0, 0), (0, 1))), _NO_LOSS))
    wanted = np.log(shares)
    found: npt.NDArray[np.float64] = np.exp([np.interp(wanted, known, row) for row in table])
    below = wanted < known[0]
    if below.any():
        slopes = (table[:, 1] - table[:, 0]) / (known[1] - known[0])
        found[:, below] = np.exp(table[:, :1] + slopes[:, None] * (wanted[below] - known[0]))
    return found


def hull(sizes: npt.NDArray[np.int64], curve: npt.NDArray[np.float64]) -> list[tuple[float, int]]:
    """Return the slope and the slots of each falling piece of a curve's lower convex hull, from left to right."""
    corners = hull_corners(sizes, curve)
    return [(_slope(sizes, curve, a, b), int(sizes[b] - sizes[a])) for a, b in pairwise(corners)]


def hull_corners(sizes: npt.NDArray[np.int64], curve: npt.NDArray[np.float64]) -> list[int]:
    """Return the points of the falling part of a curve's lower convex hull, from left to right.

    Args:
        sizes: ``[points]``, not falling; of points of equal size, the lowest counts.
        curve: ``[points]``.
    """
    corners: list[int] = []
    for point in range(len(sizes)):
        if corners and curve[point] >= curve[corners[-1]]:
            continue
        if corners and sizes[point] == sizes[corners[-1]]:
            corners.pop()
        while len(corners) > 1 and _slope(sizes, curve, corners[-2], corners[-1]) >= _slope(
            sizes, curve, corners[-1], point
        ):
            corners.pop()
        corners.append(point)
    return corners


def _slope(sizes: npt.NDArray[np.int64], curve: npt.NDArray[np.float64], start: int, end: int) -> float:
    return float((curve[end] - curve[start]) / (sizes[end] - sizes[start]))
