"""Statistics of a model: their file, and what is refused."""

import pytest
import torch
from support.codec_data import HEADS, statistics, statistics_tensors, vectors

from scissorhands.codec import Statistics, get_codec
from scissorhands.errors import InvalidRequestError


def test_a_file_holds_all_of_them(tmp_path):
    path = tmp_path / "statistics.safetensors"
    statistics(16).write(path)
    found = Statistics.read(path)
    assert found.made_by == {"model": "none"}
    assert (found.digest, found.heads, found.head_dim) == (statistics(16).digest, HEADS, 16)
    original = vectors((HEADS, 3, 16), "normal", 1.0, torch.float32)
    for name in ("klt:3", "block-gtq:3"):
        written, read = (get_codec(name, 16, made) for made in (statistics(16), found))
        assert written.version == read.version
        assert torch.equal(written.keys.encode(original), read.keys.encode(original))


def test_heads_are_those_of_the_slice():
    original = vectors((HEADS, 3, 16), "normal", 1.0, torch.float32)
    whole = get_codec("block-gtq:3", 16, statistics(16)).keys.encode(original)
    part = get_codec("block-gtq:3", 16, statistics(16), slice(1, 3)).keys.encode(original[1:])
    assert torch.equal(part, whole[1:])


@pytest.mark.parametrize("name", list(statistics_tensors(16)))
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "shape", "dtype"])
def test_spoiled_tensors_are_refused(name, wrong):
    tensors = dict(statistics_tensors(16))
    spoiled = tensors[name].clone()
    if wrong == "shape":
        spoiled = spoiled[:, :-1]
    elif wrong == "dtype":
        spoiled = spoiled.double()
    else:
        spoiled.view(-1)[3] = wrong
    tensors[name] = spoiled
    with pytest.raises(InvalidRequestError, match="make it anew"):
        Statistics(tensors, {})


@pytest.mark.parametrize("name", ["keys.spectrum", "values.analysis"])
def test_missing_tensors_are_refused(name):
    tensors = {key: tensor for key, tensor in statistics_tensors(16).items() if key != name}
    with pytest.raises(InvalidRequestError, match=name):
        Statistics(tensors, {})


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\xff" * 8])
def test_what_is_no_file_of_statistics_is_refused(tmp_path, data):
    path = tmp_path / "statistics.safetensors"
    path.write_bytes(data)
    with pytest.raises(InvalidRequestError, match="cannot read"):
        Statistics.read(path)
    with pytest.raises(InvalidRequestError, match="cannot read"):
        Statistics.read(tmp_path / "none")


def test_codecs_of_degenerate_statistics_stay_finite():
    """Directions that the calibration never saw."""
    tensors = {name: tensor.clone() for name, tensor in statistics_tensors(16).items()}
    for side in ("keys", "values"):
        tensors[f"{side}.spectrum"][:, 3:] = 0
    tensors["rotary.energy"][:] = 0
    found = Statistics(tensors, {})
    original = vectors((HEADS, 4, 16), "outliers", 1e4, torch.float32)
    for name in ("klt:2", "klt:6", "block-gtq:2", "block-gtq:4"):
        codec = get_codec(name, 16, found)
        for side in (codec.keys, codec.values):
            assert bool(torch.isfinite(side.decode(side.encode(original), 4, 16, torch.float16)).all())
