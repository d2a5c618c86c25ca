"""Which requests are compared with a full cache, and when the comparison may run."""

import pytest
import torch
from prometheus_client import CollectorRegistry
from support.tiny_models import VOCABULARY, random_tokens, tiny_model

from scissorhands.attention import NAME
from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape
from scissorhands.step import ModelStep
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.quality import ShadowResult
from scissorhands_server.worker.sampling import Sampler, SamplingParameters
from scissorhands_server.worker.shadow import CHUNK
from scissorhands_server.worker.shadows import ShadowLimits, Shadows, sampled
from scissorhands_server.worker.task import Finished, GenerationRequest, Task

PROMPT = 5 * CHUNK


def test_the_share_decides_how_many_sessions_are_compared():
    ids = [f"{index * 2**32 // 1000:08x}0123456789abcdef" for index in range(1000)]
    for share in (0.0, 0.25, 1.0):
        assert sum(sampled(session_id, share) for session_id in ids) == share * 1000


@pytest.fixture
def model():
    model = tiny_model("llama_grouped")
    model.set_attn_implementation(NAME)
    return model


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def shadows_of(model, registry):
    metrics = WorkerMetrics(registry, "tiny", 1, 1)

    def new_cache():
        return ResidentCache(model_shape(model), model.dtype, model.device)

    def make(size=1 << 30, load=0.1, patience=60.0):
        return Shadows(ModelStep(model), new_cache, VOCABULARY, metrics, ShadowLimits(size, load, patience))

    return make


def task_of(model, name, new=8):
    request = GenerationRequest(
        tuple(random_tokens(PROMPT, 1).tolist()), new, SamplingParameters(0, 1, 0, 1, None), (), True
    )
    granted = grant(BudgetRequest.tokens(40), PolicyRequest("h2o"), model_shape(model))
    return Task(name, request, granted, "", Sampler(request.sampling), None, None, 0.0, shadowed=True)


def choose(shadows, task, count):
    """Let a task choose tokens as the engine does."""
    for index in range(count):
        shadows.hold(task, torch.zeros(VOCABULARY))
        task.ids.append(5 + index)


def finish(shadows, task):
    task.finished = Finished("length", "")
    return shadows.finish(task)


@torch.inference_mode()
def test_while_requests_run_it_takes_its_share_of_the_time_and_no_more(model, shadows_of, registry):
    shadows = shadows_of(load=0.5)
    shadows.begin(task_of(model, "a"))

    def seconds():
        return registry.get_sample_value("scissorhands_worker_shadow_seconds_total")

    shadows.work(0.0, busy=True)
    first = seconds()
    assert first > 0
    shadows.work(first, busy=True)  # Only half of the debt is paid.
    assert seconds() == first
    shadows.work(1.01 * first, busy=True)
    second = seconds()
    assert second > first
    shadows.work(0.0, busy=False)
    assert seconds() > second


@torch.inference_mode()
def test_without_a_share_it_waits_until_nobody_runs(model, shadows_of):
    shadows = shadows_of(load=0.0)
    task = task_of(model, "a")
    shadows.begin(task)
    choose(shadows, task, 3)
    assert finish(shadows, task)
    assert [shadows.work(1e9, busy=True) for _ in range(10)] == [[]] * 10
    turns = [shadows.work(0.0, busy=False) for _ in range(6)]
    assert turns == [[], [], [], [], [], [task]]
    assert task.quality.shadow is ShadowResult.MEASURED
    assert task.quality.comparison.tokens == 3


@torch.inference_mode()
def test_who_waits_comes_first_and_a_late_one_waits_no_longer(model, shadows_of):
    shadows = shadows_of(patience=0.0)
    running, done = task_of(model, "running"), task_of(model, "done")
    for task in (running, done):
        shadows.begin(task)
    choose(shadows, done, 2)
    assert finish(shadows, done)
    assert shadows.waited_for == [done]
    assert shadows.work(0.0, busy=False) == [done]
    assert done.quality.shadow is ShadowResult.LATE
    assert done.quality.comparison is None
    assert shadows.waited_for == []


def test_memory_is_a_full_caches_and_given_back(model, shadows_of, registry):
    shape = model_shape(model)
    row = grant(BudgetRequest.fraction(1.0), PolicyRequest("full"), shape, PROMPT + 8).bytes
    need = row + 8 * VOCABULARY * 4
    shadows = shadows_of(size=2 * need)
    tasks = [task_of(model, name) for name in "abc"]
    for task in tasks:
        shadows.begin(task)
    assert [task.quality.shadow for task in tasks] == [None, None, ShadowResult.NO_MEMORY]
    assert registry.get_sample_value("scissorhands_worker_shadow_reserved_bytes") == 2 * need
    shadows.drop(tasks[0])
    assert tasks[0].quality.shadow is ShadowResult.CANCELLED
    assert shadows.drop_all() == []
    assert registry.get_sample_value("scissorhands_worker_shadow_reserved_bytes") == 0
