"""How fast codecs encode and decode, as a fraction of a memory copy of the same input.

    python -m benchmarks.codec --json benchmarks/results/codec.json --plot benchmarks/results/codec.png

Keys of float32 on the CPU, on one thread, in three shapes: a ``segment``, which is what one plan evicts of a whole
row, layer after layer, as it is encoded for the store; ``large``, one layer of a long prompt; and ``layer``, one layer
of the segment again and again, which a copy only moves within the second-level cache. A copy is ``clone()``: like a
codec, it has to find memory for what it makes.

A ratio is the median of the copy's time over the codec's, run after run, each in turn. ``codec_over_copy`` is the least
of the default codec of segments, of encoding and decoding, on the segment and the large shape. Where the rest of the
time goes is told by timing the steps of the codec.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import environment, interleaved, paired_ratio, save_plot, shares, write_results
from scissorhands.codec import Statistics, VectorCodec, base, get_codec, grouped, kivi
from scissorhands.codec.packing import Packing
from scissorhands.codec.scaled import Scaled
from scissorhands.formats import parse
from scissorhands_server.heap import keep_large_blocks

# What segments are encoded in if nothing is said.
DEFAULT = "int4"
CODECS = ("none", "int8", "int4", "int4-hadamard", "turboquant:k4v4", "klt:k4v4", "block-gtq:k4v4", "kivi:k4v4")
GOAL = 0.1
_SEED = 0
_HEADS, _HEAD_DIM = 3, 64
# Layers, and slots of each: those of a row of SmolLM2-135M at 2,048 tokens and a fifth of them; and a long prompt's.
SHAPES = {"segment": (30, 410), "large": (1, 40960), "layer": (1, 410)}
# The steps of codecs, as they are told apart.
_STEPS: dict[str, tuple[tuple[Any, str], ...]] = {
    "check": ((base, "require_finite"), (kivi, "require_finite")),
    "quantize": ((grouped, "quantize"), (kivi, "quantize"), (Scaled, "_quantize")),
    "dequantize": ((grouped, "dequantize"), (kivi, "dequantize")),
    "pack": ((Packing, "pack"),),
    "unpack": ((Packing, "unpack"), (Packing, "unpack_rows"), (Packing, "words"), (Packing, "numbers")),
    "rotate": ((torch, "matmul"),),
}


@click.command()
@click.option("--codec", "codecs", multiple=True, default=CODECS, show_default=True, help="Repeatable.")
@click.option("--rounds", type=int, default=15, show_default=True, help="Measured runs of each.")
@click.option("--quick", is_flag=True, help="Few rounds, and a smaller large shape.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the results here, as PNG.")
def main(*, codecs: tuple[str, ...], rounds: int, quick: bool, out: Path | None, plot: Path | None) -> None:
    """Measure codecs against a memory copy."""
    torch.set_num_threads(1)
    keep_large_blocks()  # As a worker does.
    before = environment()
    shapes = dict(SHAPES)
    if quick:
        rounds, shapes["large"] = 3, (1, 10240)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for shape, (layers, slots) in shapes.items():
        own = measure(shape, layers, slots, codecs, rounds)
        rows += own
        for row in own:
            name, suffix = row["codec"], "" if shape == "segment" else f"_{shape}"
            ratios |= {f"{way}_over_copy_{name}{suffix}": row[f"{way}_over_copy"] for way in ("encode", "decode")}
    headline = [row for row in rows if row["codec"] == parse(DEFAULT).name and row["shape"] != "layer"]
    if headline:
        ratios["codec_over_copy"] = min(
            row[way] for row in headline for way in ("encode_over_copy", "decode_over_copy")
        )
    _show(rows)
    settings = {
        "codecs": codecs, "rounds": rounds, "shapes": shapes, "kv_heads": _HEADS, "head_dim": _HEAD_DIM,
        "dtype": "float32", "default": DEFAULT, "goal": GOAL, "seed": _SEED,
    }  # fmt: skip
    write_results(out, settings, before, ratios, rows=rows)
    if plot:
        save_plot(draw(rows), plot)


@torch.inference_mode()
def measure(shape: str, layers: int, slots: int, codecs: tuple[str, ...], rounds: int) -> list[dict[str, Any]]:
    """Measure the codecs on one shape."""
    generator = torch.Generator().manual_seed(_SEED)
    keys = [torch.randn(_HEADS, slots, _HEAD_DIM, generator=generator) for _ in range(layers)]
    found = []
    for name in codecs:
        codec = get_codec(name, _HEAD_DIM, statistics() if parse(name).calibrated else None).keys
        encoded = [codec.encode(own) for own in keys]
        cases: dict[str, Callable[[], object]] = {
            "copy": partial(_each, torch.clone, keys),
            "encode": partial(_each, codec.encode, keys),
            "decode": partial(_each, partial(_decode, codec, slots), encoded),
        }
        seconds = interleaved(cases, rounds, f"{shape} {name}")
        numbers = layers * _HEADS * slots * _HEAD_DIM
        found.append(
            {
                "shape": shape,
                "codec": name,
                "encode_over_copy": paired_ratio(seconds["copy"], seconds["encode"]),
                "decode_over_copy": paired_ratio(seconds["copy"], seconds["decode"]),
                **{f"{case}_nanoseconds_per_number": 1e9 * median(own) / numbers for case, own in seconds.items()},
                "encode_shares": shares(cases["encode"], _STEPS),
                "decode_shares": shares(cases["decode"], _STEPS),
            }
        )
    return found


def _each(work: Callable[[torch.Tensor], torch.Tensor], layers: list[torch.Tensor]) -> list[torch.Tensor]:
    return [work(own) for own in layers]


def _decode(codec: VectorCodec, slots: int, data: torch.Tensor) -> torch.Tensor:
    return codec.decode(data, slots, _HEAD_DIM, torch.float32)


def statistics() -> Statistics:
    """Return statistics of no model: speed does not depend on what a transform is."""
    eye = torch.eye(_HEAD_DIM, dtype=torch.float16).expand(_HEADS, -1, -1).contiguous()
    spectrum = torch.logspace(0, -3, _HEAD_DIM).expand(_HEADS, -1).contiguous()
    tensors = {
        f"{side}.{part}": own
        for side in ("keys", "values")
        for part, own in (("analysis", eye), ("spectrum", spectrum))
    }
    tensors["rotary.energy"] = torch.logspace(2, -1, _HEAD_DIM // 2).expand(_HEADS, -1).contiguous()
    return Statistics(tensors, {})


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("Shape", "Codec", "Encode / copy", "Decode / copy", "Where encoding goes", "Where decoding goes")
    for row in rows:
        goes = [
            ", ".join(f"{name} {share:.0%}" for name, share in sorted(row[way].items(), key=lambda item: -item[1]))
            for way in ("encode_shares", "decode_shares")
        ]
        table.add_row(
            row["shape"], row["codec"], f"{row['encode_over_copy']:.3f}", f"{row['decode_over_copy']:.3f}", *goes
        )
    Console().print(table)


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draw the ratios of each codec, a panel for each shape."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    for axes, shape in zip(figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0], shapes, strict=True):
        own = [row for row in rows if row["shape"] == shape]
        for offset, way in ((-0.2, "encode"), (0.2, "decode")):
            places = [index + offset for index in range(len(own))]
            axes.bar(places, [row[f"{way}_over_copy"] for row in own], width=0.4, label=way)
        axes.axhline(GOAL, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(own)), [row["codec"] for row in own], rotation=45, ha="right")
        axes.set_yscale("log")
        axes.set_title(shape)
    axes.legend(frameon=False)
    figure.supylabel("Speed over that of a memory copy")
    return figure


if __name__ == "__main__":
    main()
