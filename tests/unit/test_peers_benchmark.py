"""The parts of the comparison to kvpress and QuantizedCache that need neither."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.peers import environment
from benchmarks.peers.checks import Checks
from benchmarks.peers.presses import FULL, PEERS, Peer, press, quantized
from benchmarks.peers.program import PeerError, Program
from benchmarks.peers.run import Plan, agreement, grant_of, row_fields
from scissorhands.budget import ModelShape
from scissorhands.evaluation.report import entries
from scissorhands.evaluation.results import Results

SHAPE = ModelShape(layers=2, kv_heads=3, head_dim=4, element_bytes=4)
TOKENS = np.arange(10, dtype=np.int64).reshape(2, 5)
KNORM = Peer("knorm", press("KnormPress"))
FAULTY = Peer("faulty", press("FaultyPress"))
PACKED = Peer("packed4", None, codec="packed4", cache=quantized(4))
BOTH = Peer("knorm@128+packed4", press("KnormPress"), interval=128, codec="packed4", cache=quantized(4))
OUTCOME = {
    "first_eviction": 2,
    "peak_slots": 3.0,
    "cache_bytes": SHAPE.full_bytes(3),
    "packed_bytes": 0,
    "press_bytes": 96,
    "element_bytes": 4,
    "in_order": False,
}

# Answers like kvpress_losses.py, without kvpress: the loss of a token is its id.
STAND_IN = """
import json, sys, time
import numpy as np
verb, path = sys.argv[1:]
request = json.load(open(path))
tokens = np.load(request["tokens"])
say = lambda message: print(json.dumps(message), flush=True)
if verb == "check":
    for task in request["tasks"]:
        faulty = task["press"]["class"] == "FaultyPress"
        say({"error": "AssertionError: only in prefill"} if faulty else {"feeding": 16, "verdict": "equal"})
elif request["task"]["press"]["class"] == "FaultyPress":
    sys.exit("RuntimeError: holds 9 tokens a layer, 4 are allowed")
else:
    for column in range(tokens.shape[1] - 1):
        say({"done": len(tokens)})
    np.save(request["losses"], tokens[:, 1:].astype("<f4"))
    say({"outcome": {"peak_slots": 4.0}})
"""


@pytest.fixture
def program(tmp_path):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return Program([sys.executable, str(script)], tmp_path, "some/model", TOKENS, "float32")


def plan(peer=KNORM, **changes):
    return Plan(**{"peer": peer, "budget": 0.5, "slots": 32, "raised": False, "feeding": 16, "verdict": "", **changes})


def test_names_are_unique_and_tell_an_interval_that_is_not_ours():
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    assert len({(peer.policy, peer.codec) for peer in PEERS}) == len(PEERS)
    for peer in (peer for peer in PEERS if peer.press):
        written = re.search(r"@(\d+)$", peer.policy)
        assert peer.interval == (int(written.group(1)) if written else 16)
        # A press without the states of all tokens since the last compression could not be fed in blocks.
        assert peer.buffer in (0, peer.interval)


def test_a_task_is_json_and_nests_presses():
    adakv = next(peer for peer in PEERS if peer.name == "adakv")
    task = json.loads(json.dumps(adakv.task(slots=100, feeding=16)))
    assert task["press"] == {
        "class": "AdaKVPress",
        "arguments": {"press": {"class": "KnormPress", "arguments": {}}},
    }
    assert (task["slots"], task["feeding"], task["interval"]) == (100, 16, 16)
    assert FULL["press"] is None
    assert FULL.keys() == task.keys()


def test_a_name_has_the_codec_and_a_row_has_it_apart():
    for peer in PEERS:
        assert (peer.codec == "none") == (peer.cache is None)
        assert peer.name.rpartition("+")[2] == (peer.codec if peer.cache else peer.name)
    assert plan(BOTH).key == {"policy": "kvpress:knorm@128", "codec": "packed4", "budget": 0.5}
    assert plan(PACKED).key == {"policy": "transformers:full", "codec": "packed4", "budget": 0.5}


def test_a_task_tells_of_a_cache_only_if_it_packs():
    task = json.loads(json.dumps(BOTH.task(slots=300, feeding=128)))
    assert task["cache"] == {
        "backend": "quanto",
        "nbits": 4,
        "axis_key": 0,
        "axis_value": 0,
        "q_group_size": 64,
        "residual_length": 128,
    }
    assert task.keys() - KNORM.task().keys() == {"cache", "prompt"}
    # Blocks of an interval end where the cache packs.
    packing = {peer.name for peer in PEERS if peer.cache and peer.interval != peer.cache["residual_length"]}
    # It cannot be measured, and a run says why.
    assert packing == {"tova+quantized4"}


def test_the_versions_are_those_of_the_pins():
    versions = environment.versions()
    assert f"kvpress=={versions['kvpress']}" == environment.KVPRESS
    assert f"torch=={versions['torch']}" in (environment.FOLDER.parents[1] / "constraints.txt").read_text()
    # The newest that kvpress takes is below 5.3.
    assert versions["transformers"] < "5.3"


def test_another_budget_feeding_or_press_is_another_grant():
    grants = {grant_of(each) for each in (plan(), plan(slots=31), plan(feeding=1), plan(FAULTY), plan(BOTH))}
    assert len(grants) == 5
    assert grant_of(plan(verdict="differs", raised=True)) == grant_of(plan())
    assert "quanto" in grant_of(plan(BOTH))
    assert "quanto" not in grant_of(plan())


def test_a_row_counts_what_the_press_keeps_and_can_be_reported():
    losses, full = np.full((2, 4), 2.0, np.float32), np.full((2, 4), 1.0, np.float32)
    losses[:, :2] = 1.0
    row = {**plan().key, **row_fields(plan(), OUTCOME, losses, full, SHAPE, torch.float32)}
    assert row["bytes_per_sequence"] == SHAPE.full_bytes(3) + 96
    assert row["bytes_16_bit"] * 2 == row["bytes_per_sequence"]
    # A full cache of 5 tokens in 16 bits, over that.
    assert row["compression"] == pytest.approx(SHAPE.full_bytes(5) / 2 / row["bytes_16_bit"])
    assert row["increase_percent"] == pytest.approx(100 * np.expm1(0.5))
    assert row["increase_percent_after_eviction"] == pytest.approx(100 * np.expm1(1.0))
    (entry,) = entries([Results({}, {}, {"loss_sums": [4.0, 4.0], "loss_count": 4}, [row])])
    assert entry.name == f"knorm, {environment.KVPRESS.replace('==', ' ')}"
    assert entry.excess == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("peer", "name"),
    [(PACKED, "full, packed4, transformers {transformers}"), (BOTH, "knorm@128, packed4, kvpress {kvpress}")],
)
def test_packed_numbers_count_as_they_are_and_the_report_tells_the_codec(peer, name):
    losses = np.ones((2, 4), np.float32)
    outcome = {**OUTCOME, "cache_bytes": 1000, "packed_bytes": 600}
    row = {**plan(peer).key, **row_fields(plan(peer), outcome, losses, losses, SHAPE, torch.float32)}
    assert row["bytes_per_sequence"] == 1000 + 96
    assert row["bytes_16_bit"] == 600 + (400 + 96) // 2
    assert "packed" in row["compression_basis"]
    (entry,) = entries([Results({}, {}, {"loss_sums": [4.0, 4.0], "loss_count": 4}, [row])])
    assert entry.name == name.format(**environment.versions())


def test_full_caches_that_differ_are_other_work():
    losses = np.ones((2, 4), np.float32)
    near = losses + np.float32(2e-4)
    assert agreement(losses, near)["largest_mean_difference"] == pytest.approx(2e-4, rel=0.01)
    near[1] += 0.01
    with pytest.raises(PeerError, match="not the same work"):
        agreement(losses, near)


def test_losses_and_progress_come_from_the_program(program):
    done = []
    losses, outcome = program.measure(KNORM.task(), done.append)
    assert losses.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert sum(done) == 8
    assert outcome == {"peak_slots": 4.0}


def test_the_programs_last_words_are_in_the_error(program):
    with pytest.raises(PeerError, match=r"status 1.*holds 9 tokens a layer"):
        program.measure(FAULTY.task(), lambda _: None)


@pytest.mark.parametrize(
    ("code", "message"),
    [("import time; time.sleep(60)", "nothing for 0.5 s"), ("print('Loading')", "something else than JSON")],
)
def test_a_silent_or_talkative_program_is_an_error(tmp_path, code, message):
    program = Program([sys.executable, "-c", code], tmp_path, "some/model", TOKENS, "float32", silence=0.5)
    with pytest.raises(PeerError, match=message):
        program.measure(KNORM.task(), lambda _: None)


def test_a_check_is_made_once_for_a_model(program, tmp_path):
    console, path = Console(quiet=True), tmp_path / "checks.json"
    checks = Checks(path, "weights")
    assert checks.run([FAULTY, KNORM], program, console) == {"faulty": "AssertionError: only in prefill"}
    assert checks.feeding(KNORM) == (16, "equal")
    # Nothing is asked again: there is no program to answer.
    none = Program(["/nowhere", "none"], tmp_path, "some/model", TOKENS, "float32")
    assert Checks(path, "weights").run([KNORM, FAULTY], none, console) == {"faulty": "AssertionError: only in prefill"}
    with pytest.raises(PeerError, match="cannot be started"):
        Checks(path, "other weights").run([KNORM], none, console)
