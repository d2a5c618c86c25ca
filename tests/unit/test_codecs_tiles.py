"""Codecs at the speed of the cache: work is cut in tiles, and not a bit of what is stored depends on it."""

import hashlib

import pytest
import torch
from support.codec_data import ALL, HEADS, codec_of, vectors

from benchmarks import codec as benchmark
from scissorhands.codec import base, scaled
from scissorhands.codec.base import tiles_of
from scissorhands.codec.packing import packing_of

# Of what version 2 stores: no product of matrices is in it, so it is the same on all machines.
DIGESTS = {
    "none": "dd2f28838fb5c293",
    "int8": "e55de80ab1779044",
    "int4": "2d43b77b2ddcab8c",
    "kivi:2": "35cfce97c5d8cc0a",
    "kivi:4": "3b0cf0fb1fef8991",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_the_bytes_of_a_version_never_change(name):
    codec, digest = codec_of(name, 64), hashlib.sha256()
    for kind in ("normal", "outliers", "constant", "two_scales"):
        original = vectors((HEADS, 75, 64), kind, 1.0, torch.float32)
        for side in (codec.keys, codec.values):
            digest.update(side.encode(original).numpy().tobytes())
    assert codec.version == "2"
    assert digest.hexdigest()[:16] == DIGESTS[name]


def test_tiles_cover_all_vectors_once():
    rows = torch.empty(2, 3, 100, 8)
    places = list(tiles_of(rows, 8, 2 * 3 * 8 * 30))
    assert [len(range(100)[place]) for place in places] == [30, 30, 30, 10]
    assert [slot for place in places for slot in range(100)[place]] == list(range(100))
    assert len(list(tiles_of(rows.to("meta"), 8, 1))) == 1, "a device with a launch cost"
    assert list(tiles_of(torch.empty(3, 0, 8), 8, 1)) == [slice(0, 1)]


@pytest.mark.parametrize("name", ALL)
def test_tiles_change_nothing(name, monkeypatch):
    codec, original = codec_of(name, 64), vectors((HEADS, 33, 64), "outliers", 1.0, torch.float32)
    for side in (codec.keys, codec.values):
        together = side.encode(original)
        decoded = side.decode(together, 33, 64, torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(base, "_TILE", HEADS * 64 * 16)
            patch.setattr(scaled, "_TILE", HEADS * 64 * 3)
            tiled = side.encode(original)
            of_tiles = side.decode(together, 33, 64, torch.float32)
            torch.testing.assert_close(of_tiles, decoded, rtol=1e-5, atol=1e-3)
        if name in DIGESTS:
            assert torch.equal(tiled, together)
        again = side.decode(tiled, 33, 64, torch.float32)
        # Products of matrices may be summed in another order, so a tie may go the other way.
        torch.testing.assert_close((again - original).norm(), (decoded - original).norm(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("start", [0, 3, 4])
def test_levels_of_one_width_unpack_row_by_row(bits, start):
    packing = packing_of(24, bits, start)
    levels = torch.randint(2**bits, (2, 5, 24), generator=torch.Generator().manual_seed(0)).float()
    stored = torch.cat([torch.full((2, 5, start), 255, dtype=torch.uint8), packing.pack(levels)], dim=-1)
    assert torch.equal(packing.unpack_rows(stored), levels)
    behind = torch.cat([torch.zeros(1, dtype=torch.uint8), stored[0, 0]])[1:]  # It begins at an odd byte.
    assert torch.equal(packing.unpack_rows(behind.unsqueeze(0)), levels[0, :1])


@pytest.mark.parametrize("name", ["int4", "kivi:4", "turboquant:4"])
def test_finite_numbers_whose_sum_is_not_are_encoded(name):
    side = codec_of(name, 64).keys
    assert bool(
        torch.isfinite(side.decode(side.encode(torch.full((HEADS, 40, 64), 3e38)), 40, 64, torch.float32)).all()
    )


def test_the_benchmark_tells_where_the_time_goes():
    rows = benchmark.measure("layer", 1, 40, ("int4", "klt:k4v4"), 1)
    assert [set(row["encode_shares"]) for row in rows] == [
        {"check", "quantize", "pack", "other"},
        {"check", "rotate", "quantize", "pack", "other"},
    ]
    for row in rows:
        assert row["encode_over_copy"] > 0
        assert sum(row["encode_shares"].values()) == pytest.approx(1, abs=0.01)
        assert sum(row["decode_shares"].values()) == pytest.approx(1, abs=0.01)
    assert torch.matmul.__name__ == "matmul", "what was named is itself again"
