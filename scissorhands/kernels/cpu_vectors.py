"""What the processor's kernel computes with: exponentials, and vectors out of their bytes."""

import numpy as np
from numba import njit
from numba.extending import overload

from scissorhands.compiled import FAST


# In this order: what is left of a number by the whole exponent is found in two steps, so as to lose nothing.
@njit(forceinline=True, fastmath={"nsz", "contract"}, error_model="numpy")
def exp(x):
    """Return e to the power of a float32 that is not above 0, to 2 units in the last place; NaN stays NaN.

    It is worked out for many numbers at once, which calls of the C library are not: the power of two of the nearest
    whole exponent, times the series of what is left (Cephes, expf).
    """
    least = np.float32(-87.0)
    x = least if x < least else x
    whole = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    x -= whole * np.float32(0.693359375)
    x -= whole * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * x + np.float32(1.3981999507e-3)
    y = y * x + np.float32(8.3334519073e-3)
    y = y * x + np.float32(4.1665795894e-2)
    y = y * x + np.float32(1.6666665459e-1)
    y = y * x + np.float32(5.0000001201e-1)
    y = y * x * x + x + np.float32(1.0)
    return y * np.int32((np.int32(whole) + 127) << 23).view(np.float32)


@njit(forceinline=True, fastmath=FAST, error_model="numpy")
def softmax(scores):
    """Turn scores ``[group, n]`` float32 into shares, in place. NaN among a query's scores makes all its shares NaN."""
    group, used = scores.shape
    for member in range(group):
        top = np.float32(-np.inf)
        for index in range(used):
            score = scores[member, index]
            top = score if score > top else top
        total = np.float32(0)
        for index in range(used):
            found = exp(scores[member, index] - top)
            scores[member, index] = found
            total += found
        factor = np.float32(1) / total
        for index in range(used):
            scores[member, index] *= factor


def vector_of(data, buffer, bits, group, bend):
    """Return a vector in the codec's basis, without its scale; packed ones are unpacked into ``buffer``."""
    raise NotImplementedError


def scale_of(data, group):
    """Return the scale of a vector; 1 where there is none."""
    raise NotImplementedError


@overload(vector_of, jit_options={"forceinline": True, "fastmath": FAST})
def _vector_of_its_kind(data, buffer, bits, group, bend):
    if data.dtype.name == "float32":
        return lambda data, buffer, bits, group, bend: data
    return _unpacked


@overload(scale_of, jit_options={"forceinline": True, "fastmath": FAST})
def _scale_of_its_kind(data, group):
    if data.dtype.name == "float32":
        return lambda data, group: np.float32(1)
    return _scale_packed


def _scale_packed(data, group):
    if group:
        return np.float32(1)
    return np.int32(data[0] << 16 | data[1] << 24).view(np.float32)


def _unpacked(data, buffer, bits, group, bend):
    head_dim = len(buffer)
    width = head_dim * bits // 8
    start = 4 * (head_dim // group) if group else 2
    mask = np.uint8(2**bits - 1)
    for plane in range(8 // bits):
        for byte in range(width):
            buffer[plane * width + byte] = np.float32((data[start + byte] >> np.uint8(plane * bits)) & mask)
    if group:
        groups = head_dim // group
        for own in range(groups):
            low, step = _half(data, 2 * own), _half(data, 2 * (groups + own))
            for element in range(own * group, (own + 1) * group):
                buffer[element] = low + step * buffer[element]
    else:
        top = np.float32(2**bits - 1)
        for element in range(head_dim):
            twice = np.float32(2) * buffer[element] - top
            buffer[element] = twice + np.float32(bend) * twice * twice * twice
    return buffer


@njit(forceinline=True, fastmath=FAST, error_model="numpy")
def _half(data, at):
    """Return the finite float16 that two bytes are."""
    bits = np.int32(data[at]) | np.int32(data[at + 1]) << 8
    size = np.int32((bits & 0x7FFF) << 13).view(np.float32) * np.float32(2.0**112)
    return -size if bits & 0x8000 else size
