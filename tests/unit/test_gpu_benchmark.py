"""The benchmark for GPUs, at small size on the processor."""

import itertools
import json

import pytest
import torch
from click import ClickException
from click.testing import CliRunner

from benchmarks import gpu
from benchmarks.gpu import LLAMA_3_8B, cells, check, main
from scissorhands.budget import ModelShape


def test_a_small_run_tells_what_stands_for_it(tmp_path):
    arguments = ["--device", "cpu", "--small", "--rounds", "1", "--json", str(tmp_path / "a.json")]
    result = CliRunner().invoke(main, [*arguments, "--plot", str(tmp_path / "a.png")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["environment"]["ran_on"] == "cpu"
    assert found["settings"]["skipped"] == []
    assert found["ratios"].keys() >= {"bandwidth_share_most", "tokens_at_equal_memory_256", "budget_over_full_least"}
    cases = {(row["context"], row["rows"], row["case"]): row for row in found["rows"]}
    assert {(context, rows) for context, rows, _ in cases} == {(256, 1), (512, 1), (256, 4), (512, 4)}
    for context in (256, 512):
        kept, whole = (cases[context, 4, case]["cache_bytes"] for case in ("budget", "full"))
        assert kept < 0.25 * whole


def test_a_device_that_computes_something_else_is_refused(monkeypatch):
    decode, calls = gpu._decode, itertools.count()

    def decoded(model, prompt, new):
        wrong = 0.01 * next(calls)  # The first is the processor's.
        for index, logits in enumerate(decode(model, prompt, new)):
            yield logits + wrong * (index > 50)

    monkeypatch.setattr(gpu, "_decode", decoded)
    with pytest.raises(ClickException, match="away from those of the processor"):
        check(torch.device("cpu"))


def test_cells_fit_into_the_room_with_every_byte_counted():
    config = LLAMA_3_8B
    shape = ModelShape(config.num_hidden_layers, config.num_key_value_heads, 128, 2, 4)
    room = 100 << 30
    found = list(cells(shape, room, (4096, 65536), (1, 16, 64)))
    whole = 2 * 32 * 8 * 128 * 2  # Bytes of a token.
    for cell in found:
        assert cell.with_full == (cell.rows * cell.context * whole * 1.45 < room), cell
    assert {(cell.context, cell.rows) for cell in found} == {(4096, 1), (65536, 1), (4096, 16), (65536, 16), (4096, 64)}
