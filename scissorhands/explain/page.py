"""One HTML page of a recording, complete in itself: no network, and no script but its own."""

import base64
import hashlib
import html
import json
from dataclasses import asdict
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from scissorhands.explain.recording import Recording

# The parts of the page's script, in order.
_SCRIPTS = ("state.js", "pictures.js", "page.js")


def page(recording: Recording, texts: list[str], model: str, budget: str) -> str:
    """Return the page.

    Args:
        recording: What to show.
        texts: The text of each token.
        model: The model's name.
        budget: The budget as it was asked for.
    """
    style = _asset("style.css")
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    return Template(_asset("page.html")).substitute(
        title=html.escape(f"What {model} remembers"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=_json(_data(recording, texts, model, budget)),
    )


def _data(recording: Recording, texts: list[str], model: str, budget: str) -> dict[str, Any]:
    """Return what the script reads; see ``state.js``."""
    _, heads, appended = recording.dropped_at.shape
    cuts = recording.cuts
    return {
        "model": model,
        "texts": texts,
        "prompt": recording.prompt,
        "layers": recording.shape.global_layers,
        "slidingLayers": recording.shape.layers - len(recording.shape.global_layers),
        "heads": heads,
        "appended": appended,
        "cuts": {
            "step": [cut.step for cut in cuts],
            "phase": [cut.phase for cut in cuts],
            "mass": [float(f"{cut.mass:.6g}") for cut in cuts],
        },
        "droppedAt": _numbers(recording.dropped_at),
        "mass": _halved(recording.mass),
        "figures": _figures(recording, budget),
    }


def _figures(recording: Recording, budget: str) -> list[dict[str, str]]:
    """Return the figures as they are shown: a value, what it is, and what there is to say about it."""
    grant = recording.grant
    numbers = ", ".join(f"{name} {value:,}" for name, value in asdict(grant.parameters).items())
    decoding = sum(cut.phase == "decode" for cut in recording.cuts)
    ratio = recording.full_bytes / recording.allocated_bytes
    own = recording.own_full_bytes / recording.allocated_bytes
    raised = ", raised to the smallest that the policy allows" if grant.raised else ""
    policy = grant.policy if grant.preset == "default" else f"{grant.policy}:{grant.preset}"
    return [
        _figure("policy", policy, numbers),
        _figure(
            "budget",
            budget,
            f"{_slots(recording)} per layer and KV head{raised}",
        ),
        _figure(
            "allocated",
            _bytes(recording.allocated_bytes),
            f"keys, values and evidence; a full cache of {len(recording.ids):,} tokens takes "
            f"{_bytes(recording.own_full_bytes)}, in 16 bits {_bytes(recording.full_bytes)}",
        ),
        _figure("compression", f"{own:.2f}x", f"all bytes counted; {ratio:.2f}x against a full cache in 16 bits"),
        _figure(
            "evictions",
            f"{len(recording.cuts):,}",
            f"{len(recording.cuts) - decoding:,} while reading the prompt, {decoding:,} while decoding",
        ),
        _figure(
            "attention mass dropped",
            f"{recording.mass_dropped:.1%}",
            "share of all attention that lay on slots that were evicted later",
        ),
    ]


def _slots(recording: Recording) -> str:
    stored = recording.grant.shape_of(recording.shape)
    slots = sorted({recording.grant.layer_slots[layer] for layer in stored.global_layers})
    return f"{slots[0]:,} slots" if len(slots) == 1 else f"{slots[0]:,} to {slots[-1]:,} slots"


def _figure(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:  # noqa: PLR2004 - what the units are made of
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"


def _numbers(array: npt.NDArray[np.integer]) -> dict[str, Any]:
    """Return whole numbers in the fewest bytes each, little-endian, in Base64."""
    largest = int(array.max(initial=0))
    kind = np.dtype(np.min_scalar_type(largest))
    return {"bytes": kind.itemsize, "data": _base64(array.astype(kind.newbyteorder("<")))}


def _halved(array: npt.NDArray[np.float32]) -> str:
    """Return the upper halves of float32 numbers, rounded: exact to 0.4 %, and two lines to read in a browser."""
    bits = array.astype("<f4").view("<u4").astype(np.uint64) + 0x8000
    return _base64((bits >> 16).astype("<u2"))


def _base64(array: npt.NDArray[np.generic]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _json(data: dict[str, Any]) -> str:
    """Return JSON that cannot end the element it stands in, whatever the texts hold."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return files("scissorhands.explain").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return what the page's content security policy knows a script or style by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
