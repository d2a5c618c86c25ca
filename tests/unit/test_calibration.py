"""Calibration: gradients against finite differences and true divergences, replays, and the command."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from support.sliding_models import sliding_model
from support.tiny_folder import make_folder
from support.tiny_models import TINY_MODELS, random_tokens, tiny_model

from scissorhands.attention import NAME
from scissorhands.budget import BudgetRequest
from scissorhands.calibration import fisher
from scissorhands.calibration.command import calibrate
from scissorhands.calibration.fisher import record
from scissorhands.calibration.replay import head_losses, one_layer
from scissorhands.calibration.run import _all_layers
from scissorhands.errors import EngineError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape
from scissorhands.profile import FILE_NAME, Profile

LENGTH = 96
# A model, its global layer that is looked at, and that layer's place among the global ones.
LAYERS = {"llama_grouped": (1, 1), "gemma3": (1, 0)}


def a_model(name):
    model = tiny_model(name) if name in TINY_MODELS else sliding_model(name)
    model.requires_grad_(requires_grad=False)
    model.set_attn_implementation(NAME)
    return model, model_shape(model)


def draws(samples, length, seed=0):
    return torch.rand(samples, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def log_probabilities(model, tokens, layer, change):
    """Return ``[T, vocabulary]`` of the model where a layer's attention output is changed, ``[heads, T, head_dim]``."""

    def add(module, inputs):
        return (inputs[0] + change.transpose(0, 1).flatten(1).unsqueeze(0),)

    model.set_attn_implementation("eager")
    hook = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(add)
    found = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0].log_softmax(-1)
    hook.remove()
    model.set_attn_implementation(NAME)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_a_head_are_finite_differences_of_the_drawn_log_probability(name):
    model, shape = a_model(name)
    model.double()
    layer, place = LAYERS[name]
    tokens, numbers = random_tokens(40, 0), draws(2, 40)
    recording = record(model, shape, tokens, numbers)
    nothing = torch.zeros(recording.queries.shape[1:], dtype=torch.float64)
    base = log_probabilities(model, tokens, layer, nothing)
    for sample in range(2):
        drawn = fisher._draw(base, numbers[sample])
        for head in range(len(nothing)):
            change = nothing.clone()
            change[head] = torch.randn(change[head].shape, generator=torch.Generator().manual_seed(head)).double()
            step = 1e-3  # Not smaller: the norms compute in float32 all the same.
            ends = [log_probabilities(model, tokens, layer, sign * step * change) for sign in (1, -1)]
            above, below = (end[range(40), drawn].sum() for end in ends)
            expected = (above - below) / (2 * step)
            found = (recording.gradients[sample, place].double() * change).sum()
            size = (recording.gradients[sample, place, head].double()).norm()
            assert size > 0
            assert abs(float(found - expected)) < 2e-3 * float(size)


def test_the_expected_square_is_the_divergence():
    model, shape = a_model("llama_grouped")
    model.double()
    length, at, head = 12, 3, 2
    tokens = random_tokens(length, 1)
    recording = record(model, shape, tokens, draws(600, length))
    change = torch.zeros(recording.queries.shape[1:], dtype=torch.float64)
    change[head, at] = 0.02 * torch.randn(change.shape[-1], generator=torch.Generator().manual_seed(3)).double()
    full, changed = (log_probabilities(model, tokens, 0, scale * change) for scale in (0.0, 1.0))
    divergence = float((full.exp() * (full - changed)).sum())
    estimate = float((recording.gradients[:, 0].double() * change).sum((1, 2, 3)).square().mean() / 2)
    assert estimate == pytest.approx(divergence, rel=0.2)


def test_drawing_follows_the_probabilities():
    logits = torch.tensor([0.2, 0.5, 0.3]).log().expand(6, 3)
    numbers = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 0.99999])
    assert fisher._draw(logits, numbers).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", [*TINY_MODELS, "gemma3", "qwen2_sliding"])
def test_what_is_recorded_is_the_full_model(name):
    model, shape = a_model("gemma3") if name == "gemma3" else a_model(name.partition("_sliding")[0])
    if name == "qwen2_sliding":
        model = sliding_model("qwen2").requires_grad_(requires_grad=False)
        model.set_attn_implementation(NAME)
        shape = model_shape(model)
    tokens = random_tokens(LENGTH, 0).unsqueeze(0)
    view = fisher._FullView(shape)
    found = model(input_ids=tokens, cache=view, use_cache=True).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, model(input_ids=tokens, use_cache=False).logits, rtol=1e-3, atol=1e-3)
    assert len(view.outputs) == len(shape.global_layers)


def test_gradients_that_are_not_finite_are_refused():
    model, shape = a_model("llama_grouped")
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(EngineError, match="--dtype"):
        record(model, shape, random_tokens(16, 0), draws(1, 16))


@pytest.fixture(scope="module")
def recorded():
    model, shape = a_model("llama_grouped")
    return record(model, shape, random_tokens(LENGTH, 0), draws(2, LENGTH)), one_layer(shape)


def losses_of(recorded, *slots, policy="h2o"):
    recording, shape = recorded
    grants = [grant(BudgetRequest.tokens(number), PolicyRequest(policy), shape, LENGTH) for number in slots]
    return head_losses(recording, shape, grants, torch.device("cpu"))


@pytest.mark.parametrize("policy", ["h2o", "fastgen", "streaming"])
def test_keeping_all_costs_nothing_and_evicting_does(recorded, policy):
    losses = losses_of(recorded, 40, LENGTH, policy=policy)
    assert losses.shape == (2, 2, 2)
    assert np.all(losses[..., 0] > 1e-6)
    assert np.all(losses[..., 1] < 1e-6 * losses[..., 0])


def test_few_slots_cost_more_than_many(recorded):
    few, many = losses_of(recorded, 40, 80).sum(axis=(0, 1))
    assert few > 2 * many > 0


def test_a_head_without_values_costs_nothing(recorded):
    recording, shape = recorded
    values = recording.values.clone()
    values[1, 0] = 0
    losses = losses_of((replace(recording, values=values), shape), 40)[..., 0]
    assert losses[1, 0] == 0
    assert np.all(np.delete(losses.ravel(), 2) > 0)


def test_layers_in_one_batch_or_several_cost_the_same(recorded, monkeypatch):
    together = losses_of(recorded, 40, 60)
    monkeypatch.setattr("scissorhands.calibration.replay.MOST_ROWS", 1)
    np.testing.assert_allclose(losses_of(recorded, 40, 60), together, rtol=1e-4)


def test_sliding_layers_cost_nothing():
    _, shape = a_model("gemma3")
    losses = _all_layers(np.array([[[3.0, 1.0, 2.0], [1.0, 0.5, 0.25]]]), shape)
    assert losses.tolist() == [[[0.0] * 3] * 2, [[3.0, 1.0, 2.0], [1.0, 0.5, 0.25]], [[0.0] * 3] * 2]


def invoke(folder, *arguments):
    options = ["--model", folder / "model", "--text", folder / "text.txt", *arguments]
    return CliRunner().invoke(calibrate, [str(part) for part in options])


def test_the_command_writes_the_profile_beside_the_model(tmp_path):
    folder = make_folder(tmp_path, positions=256)
    result = invoke(folder, "--sequences", 2, "--length", 200)
    assert result.exit_code == 0, result.output
    path = folder / "model" / FILE_NAME
    profile = Profile.load(path)
    assert (profile.layers, profile.kv_heads) == (2, 2)
    assert {0.2, 0.5, 0.7} <= set(profile.shares)
    losses = np.array(profile.losses)
    assert np.all(losses[..., 0] > 0)
    assert np.all(np.diff(losses, axis=-1) <= 0)
    about = json.loads(path.read_text(encoding="utf-8"))["about"]
    assert (about["command"], about["policy"]) == ("calibrate", "scissorhands:uniform")
    assert len(about["grants"]) == len(profile.shares)
    assert about["weights_sha256"] == profile.model
    assert [text["name"] for text in about["texts"]] == ["text.txt"]
    assert about["environment"]["torch"] == torch.__version__
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines if line and line[0].isdigit()] == ["0", "1"]
    again = tmp_path / "again.json"
    assert invoke(folder, "--sequences", 2, "--length", 200, "--out", again).exit_code == 0
    assert Profile.load(again) == profile


@pytest.mark.parametrize(
    ("arguments", "option", "reason"),
    [
        (["--policy", "lru"], "--policy", "allowed: scissorhands"),
        (["--policy", "full", "--length", 64], "--policy", "evicts nothing"),
        (["--length", 8], "--length", "longer sequences"),
        (["--length", 300], "--length", "at most 256"),
        (["--model", "owner/none"], "--out", "is no folder"),
        (["--out", "/nowhere/profile.json"], "--out", "there is no folder"),
    ],
)
def test_what_it_refuses(tmp_path, arguments, option, reason):
    folder = make_folder(tmp_path, positions=256)
    result = invoke(folder, *arguments)
    assert result.exit_code == 2
    message = " ".join(result.output.replace("│", " ").split())
    assert option in message
    assert reason in message
    assert not (folder / "model" / FILE_NAME).exists()


def test_help_needs_no_torch():
    code = (
        "import sys; from click.testing import CliRunner; from scissorhands.calibration.command import calibrate; "
        "found = CliRunner().invoke(calibrate, ['--help']); assert '--sequences' in found.output; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
