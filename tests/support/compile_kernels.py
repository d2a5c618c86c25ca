"""Compiles the kernels for sm_90 as they would be launched, without a GPU, and prints the name and kind of each.

Run with ``TRITON_INTERPRET=0``, in a process of its own: what is interpreted cannot be compiled.
"""

import sys
from typing import Any

import torch
import triton
from support.codec_data import codec_of
from triton.backends.compiler import GPUTarget

from scissorhands.kernels import decode, launch
from scissorhands.layer_pool import LayerCodec, LayerPool
from scissorhands.new_tokens import NewTokens
from scissorhands.signals import LastAttention, LowCount, Mass, Signal, Weight, WindowMass
from scissorhands.span import Span

TARGET = GPUTarget("cuda", 90, 32)
CPU = torch.device("cpu")
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
# Codec, number type, head_dim, group, rows, signals.
CASES: list[tuple[str, torch.dtype, int, int, int, tuple[Signal, ...]]] = [
    ("none", torch.bfloat16, 128, 4, 2, (Mass(), LowCount(256))),
    ("none", torch.float32, 64, 3, 2, (Mass(), WindowMass(256), LastAttention(), Weight())),
    ("int8", torch.float16, 64, 1, 1, (Mass(),)),
    ("int4", torch.bfloat16, 128, 4, 2, (Mass(), LowCount(256))),
    ("int4-hadamard", torch.bfloat16, 128, 8, 2, (Mass(),)),
    ("turboquant:4", torch.float32, 256, 2, 2, (Mass(),)),
]


class Compiled:
    """Stands in for a kernel: a launch compiles it."""

    def __init__(self, kernel: Any, case: str) -> None:
        self.kernel, self.case = kernel, case

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self.compile

    def compile(self, *given: Any, **named: Any) -> None:
        arguments = dict(zip(self.kernel.arg_names, given, strict=False)) | named
        # As a launch does, numbers that are 1 are compiled in.
        constants = named | {name: 1 for name, value in arguments.items() if type(value) is int and value == 1}
        signature = {
            name: "constexpr" if name in constants
            else POINTERS[value.dtype] if isinstance(value, torch.Tensor)
            else "fp32" if isinstance(value, float)
            else "i32"
            for name, value in arguments.items()
        }  # fmt: skip
        assert list(signature) == self.kernel.arg_names
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, value in enumerate(arguments.values())
            if isinstance(value, torch.Tensor)
        }
        source = triton.compiler.ASTSource(self.kernel, signature, constants, aligned)
        found = triton.compile(source, target=TARGET)
        assert len(found.asm["cubin"]) > 0
        sys.stdout.write(f"{self.kernel.__name__} {self.case}\n")


def main() -> None:
    kernels = {name: getattr(decode, name) for name in ("append", "attend_split", "finish")}
    for codec, dtype, head_dim, group, rows, signals in CASES:
        for name, kernel in kernels.items():
            setattr(decode, name, Compiled(kernel, f"{codec} {dtype} {head_dim} {group}"))
        packed = None
        if codec != "none":
            found = codec_of(codec, head_dim)
            packed = LayerCodec(found.keys, found.values)
        pool = LayerPool(rows, 3, 600 if rows > 1 else 100, head_dim, signals, dtype, CPU, packed)
        assert launch.fits(pool, group)
        query, keys, values = (torch.zeros(rows, heads, 1, head_dim, dtype=dtype) for heads in (3 * group, 3, 3))
        span = Span(slice(0, rows), (7, 9)[:rows], (7, 9)[:rows], 1, CPU)
        launch.attend(pool, span, NewTokens(query, keys, values, scaling=0.3), observe=True)


if __name__ == "__main__":
    main()
