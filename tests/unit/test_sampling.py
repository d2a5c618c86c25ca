import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import VOCABULARY, random_tokens, tiny_model

from scissorhands.errors import EngineError, InvalidRequestError
from scissorhands.v1 import generation_pb2
from scissorhands_server.worker.sampling import Sampler, SamplingParameters, validate


def checked(**fields):
    return validate(generation_pb2.Sampling(**fields), VOCABULARY)


def draws(sampler, logits, count, ids=(3,)):
    return [sampler.next(logits, list(ids)) for _ in range(count)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.7},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.6},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.4},
        {"temperature": 2.0, "top_k": 0, "top_p": 1.0},
    ],
)
@pytest.mark.parametrize("seed", [0, 7, 2**63 + 11])
def test_the_tokens_are_those_of_transformers_generate(options, seed):
    model = tiny_model("llama_grouped")
    prompt = random_tokens(12, seed=1)
    sampled = "temperature" in options
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        result = model.generate(
            prompt[None],
            do_sample=sampled,
            # Its own defaults: 50 most likely tokens, unless told otherwise.
            **({"top_k": 0} | options if sampled else options),
            max_new_tokens=24,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    sampler = Sampler(checked(**options, **({"seed": seed} if sampled else {})))
    ids = prompt.tolist()
    for logits in result.logits:
        ids.append(sampler.next(logits[0], ids))
    assert ids == result.sequences[0].tolist()


def test_greedy_takes_the_lowest_of_equal_ids():
    for size in (5, 1000, 49152):
        logits = torch.zeros(size)
        logits[[size // 2, size - 2]] = 3.0
        assert draws(Sampler(SamplingParameters()), logits, 1) == [size // 2]
        assert draws(Sampler(SamplingParameters()), torch.zeros(size), 1) == [0]


def test_the_penalty_holds_for_greedy_too():
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert Sampler(SamplingParameters(repetition_penalty=2.0)).next(logits, [1]) == 2
    assert Sampler(SamplingParameters(repetition_penalty=2.0)).next(logits, [0]) == 1
    assert logits.tolist() == [1.0, 3.0, 2.0]


def test_only_the_kept_tokens_are_drawn_and_in_their_proportion():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    count = 4000

    def shares(**options):
        drawn = draws(Sampler(SamplingParameters(temperature=1.0, seed=5, **options)), logits, count)
        return torch.bincount(torch.tensor(drawn), minlength=4) / count

    assert torch.allclose(shares(), logits.exp(), atol=0.03)
    assert torch.allclose(shares(top_k=2), torch.tensor([2 / 3, 1 / 3, 0, 0]), atol=0.03)
    assert torch.allclose(shares(top_p=0.7), torch.tensor([2 / 3, 1 / 3, 0, 0]), atol=0.03)
    assert torch.allclose(shares(top_p=1e-9), torch.tensor([1.0, 0, 0, 0]))


def test_a_seed_repeats_its_tokens_and_another_gives_others():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    first = draws(Sampler(checked(temperature=1, seed=9)), logits, 40)
    assert draws(Sampler(checked(temperature=1, seed=9)), logits, 40) == first
    assert draws(Sampler(checked(temperature=1, seed=10)), logits, 40) != first


def test_what_a_row_draws_does_not_depend_on_the_others():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    alone = [draws(Sampler(checked(temperature=1, seed=seed)), logits[seed], 30) for seed in range(3)]
    samplers = [Sampler(checked(temperature=1, seed=seed)) for seed in range(3)]
    together = [[samplers[row].next(logits[row], [3]) for row in (2, 0, 1)] for _ in range(30)]
    assert [[step[at] for step in together] for at in (1, 2, 0)] == alone


def test_sampling_leaves_the_global_random_state_alone():
    state = torch.random.get_rng_state()
    draws(Sampler(checked(temperature=1, seed=3)), torch.zeros(9), 5)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_seed_is_drawn_only_where_chance_decides():
    assert checked().seed is None
    assert checked(seed=4).seed is None
    assert checked(temperature=1, seed=0).seed == 0
    assert checked(temperature=1, seed=2**64 - 1).seed == 2**64 - 1
    drawn = {checked(temperature=1).seed for _ in range(8)}
    assert None not in drawn
    assert len(drawn) > 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 100.1, math.nan, math.inf, -math.inf]),
        ("top_p", [0.0, -0.5, 1.0001, math.nan, math.inf]),
        ("repetition_penalty", [0.0, -1.0, 100.1, math.nan, math.inf]),
        ("top_k", [VOCABULARY + 1, 2**32 - 1]),
    ],
)
def test_values_out_of_range_are_refused(field, values):
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            checked(**{field: value})
        assert caught.value.field == f"sampling.{field}"
        assert "must be" in caught.value.description


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, VOCABULARY),
    penalty=st.floats(0, 100, exclude_min=True),
    logits=st.lists(st.one_of(st.floats(-1e4, 1e4, width=32), st.just(-math.inf)), min_size=9, max_size=9),
)
def test_every_value_in_range_gives_a_token_that_is_possible(temperature, top_p, top_k, penalty, logits):
    logits = torch.tensor([*logits, 0.0])
    parameters = checked(temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=penalty)
    token = Sampler(parameters).next(logits, [0, 9])
    assert logits[token] > -math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("parameters", [SamplingParameters(), SamplingParameters(temperature=1.0, seed=1)])
def test_logits_that_are_no_numbers_are_an_error_and_not_a_token(bad, parameters):
    logits = torch.zeros(9)
    logits[4] = bad
    with pytest.raises(EngineError, match="not finite"):
        Sampler(parameters).next(logits, [1])


def test_half_precision_logits_are_widened_first():
    logits = torch.tensor([1.0, 2.0, 1.5], dtype=torch.bfloat16)
    assert Sampler(SamplingParameters()).next(logits, []) == 1
    wide = draws(Sampler(checked(temperature=1, seed=1)), logits.float(), 20)
    assert draws(Sampler(checked(temperature=1, seed=1)), logits, 20) == wide
