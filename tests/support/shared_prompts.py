"""Prompts that begin alike, and what becomes of their prefixes in workers."""

from support.conversations import NEW, ask, results
from support.tiny_models import random_tokens
from support.tiny_worker import metrics
from support.waiting import until

from scissorhands.v1 import budget_pb2

SHARED = random_tokens(200, seed=1).tolist()
ENDS = [random_tokens(12, seed=seed).tolist() for seed in range(2, 12)]
HELD = "scissorhands_worker_suspension_held_bytes"
# Tokens of a boundary, and no measured speed decides anything.
SETTINGS = {"prefix_tokens": 32, "prefix_advantage": 0}
GRID = {"chunk": 16}


def options(policy, codec="none", **more):
    """Return a request's options, with a chunk that does not depend on its length."""
    name, _, preset = policy.partition(":")
    asked = budget_pb2.Policy(name=name, preset=preset, parameters={"chunk": 16})
    return {"policy": asked, "resident_codec": codec, "new": NEW, **more}


FULL = options("full")


async def answer(stub, prompt, **more):
    """Return the tokens of an answer, and how many of its prompt were not read."""
    _, tokens, finish = await ask(stub, prompt, **more)
    return tokens, finish.usage.prefix_tokens


async def stored(*made):
    """Wait until nothing is on its way to the store."""
    await until(lambda: all(metrics(worker)[HELD] == 0 for worker in made), "prefixes to be stored")


def counts(worker, kind="lookups"):
    return results(worker, f"prefix_{kind}")
