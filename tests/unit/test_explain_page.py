"""The page of ``scissorhands explain``: what its own script reads from it, and that no text breaks out of it."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
import quickjs
import torch
from support.sliding_models import sliding_model
from support.tiny_models import VOCABULARY, tiny_model
from support.tiny_tokenizers import byte_fallback, byte_level

from scissorhands.budget import BudgetRequest, EvictionParameters, Grant, ModelShape
from scissorhands.explain.page import page
from scissorhands.explain.record import record
from scissorhands.explain.recording import Cut, Recording
from scissorhands.explain.tokens import token_texts
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape, probe

PROMPT = 150
NEW = 40
SLOTS = 60
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "&lt;b&gt; & $data ${data} ' \" \\",
    "\u2028\n\t",
    "\ud800",
]


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    made = tiny_model("llama_grouped")
    probe(made)
    return made


def prompt_ids():
    return np.random.default_rng(3).integers(3, VOCABULARY, PROMPT).tolist()


def granted(model, policy, slots=SLOTS):
    return grant(BudgetRequest.tokens(slots), PolicyRequest(policy), model_shape(model), PROMPT + NEW)


def run(model, policy, slots=SLOTS):
    """Return a recording, and the positions that each layer and head held after each eviction."""
    held = {}

    def look(row):
        layers = [pool.positions[row.index, :, :used] for pool, used in zip(row.pool.layers, row.lengths, strict=True)]
        held.setdefault(row.epoch, [set(head.tolist()) for layer in layers for head in layer])

    return record(model, granted(model, policy, slots), prompt_ids(), NEW, progress=look), held


class Parts(HTMLParser):
    """The tags of a page, and what stands in its scripts, its styles and its title."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], {}
        self.now = ("", None)
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        self.now = (tag, dict(attrs).get("id"))

    def handle_data(self, data):
        if self.now[0] in ("script", "style", "title"):
            self.texts[self.now] = self.texts.get(self.now, "") + data

    def handle_endtag(self, tag):
        self.now = ("", None)

    @property
    def data(self):
        return json.loads(self.texts["script", "data"])


def rendered(recording, texts=None, model="tiny"):
    texts = texts or [str(token) for token in recording.ids]
    return page(recording, texts, model=model, budget="30%")


def script(data):
    """Return the page's own reading of its data, without the part that draws."""
    context = quickjs.Context()
    context.set("raw", json.dumps(data))
    context.eval(files("scissorhands.explain").joinpath("assets", "state.js").read_text(encoding="utf-8"))
    context.eval("const state = readState(JSON.parse(raw)), everyLane = lanesOf(state, null, null);")
    return lambda expression: json.loads(context.eval(f"JSON.stringify({expression})"))


HELD = (
    "state.moments.map((moment) => everyLane.map((lane) =>"
    " [...Array(state.appended).keys()].filter((position) => holds(state, moment, lane, position))))"
)


@pytest.mark.parametrize("policy", ["scissorhands", "h2o", "streaming"])
def test_the_page_shows_what_the_cache_held_after_every_eviction(model, policy):
    recording, held = run(model, policy)
    assert {cut.phase for cut in recording.cuts} == {"prefill", "decode"}
    evaluate = script(Parts(rendered(recording)).data)
    moments, shown = evaluate("state.moments"), evaluate(HELD)
    assert [moment["kind"] for moment in moments] == ["before", *["after"] * len(recording.cuts), "end"]
    assert [moment["seen"] for moment in moments[1:-1]] == [cut.step for cut in recording.cuts]
    for moment, lanes in zip(moments[:-1], shown, strict=False):
        # The pass after an eviction appends newer tokens; before the first one, everything is held.
        truth = held[moment["cuts"]] if moment["cuts"] else [set(range(moment["seen"]))] * len(lanes)
        expected = [{position for position in lane if position < moment["seen"]} for lane in truth]
        assert [set(lane) for lane in lanes] == expected
        assert moment["held"] == pytest.approx(np.mean([len(lane) for lane in expected]))
    assert [len(lane) for lane in shown[-1]] == [round(moments[-1]["held"])] * len(shown[-1])
    assert moments[-1]["massDropped"] == pytest.approx(recording.mass_dropped, rel=1e-4)


def test_shares_by_layer_and_head(model):
    recording, _ = run(model, "h2o")
    evaluate = script(Parts(rendered(recording)).data)
    moment = len(recording.cuts) // 2
    dropped = recording.dropped_at
    alive = ((dropped == 0) | (dropped > moment)) & (np.arange(recording.appended) < recording.cuts[moment - 1].step)
    for view, lanes in {"null, null": (slice(None), slice(None)), "1, null": (1, slice(None)), "0, 1": (0, 1)}.items():
        shares = evaluate(f"sharesOf(state, state.moments[{moment}], lanesOf(state, {view}))")
        expected = alive[lanes].reshape(-1, recording.appended).mean(axis=0)
        assert np.allclose(list(shares["held"].values()), expected)
        lost = (dropped == moment)[lanes].reshape(-1, recording.appended).mean(axis=0)
        assert np.allclose(list(shares["lost"].values()), lost)


def test_every_query_gives_one_unit_of_mass(model):
    recording, _ = run(model, "scissorhands")
    assert np.allclose(recording.mass.sum(axis=2), recording.appended, rtol=1e-4)
    shown = script(Parts(rendered(recording)).data)(
        "Array.from({length: state.appended}, (_, p) => meanMass(state, everyLane, p))"
    )
    assert np.allclose(shown, recording.mass.mean(axis=(0, 1)), rtol=4e-3)


def test_without_evictions_there_is_one_moment_and_the_answer_is_that_of_transformers(model):
    recording, _ = run(model, "full", slots=PROMPT + NEW)
    moments = script(Parts(rendered(recording)).data)("state.moments")
    assert [(moment["kind"], moment["seen"], moment["held"]) for moment in moments] == [("end", 189, 189)]
    plain = tiny_model("llama_grouped")
    answer = plain.generate(torch.tensor([prompt_ids()]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert recording.ids == tuple(answer[0].tolist())


def test_only_global_layers_are_shown():
    sliding = sliding_model("gemma3")
    probe(sliding)
    recording, held = run(sliding, "h2o")
    shape = recording.shape
    data = Parts(rendered(recording)).data
    assert (data["layers"], data["slidingLayers"]) == (list(shape.global_layers), shape.layers - len(data["layers"]))
    assert data["slidingLayers"] > 0
    assert np.allclose(recording.mass.sum(axis=2), recording.appended, rtol=1e-4)
    last = script(data)(HELD)[-2]
    seen, heads = recording.cuts[-1].step, shape.kv_heads
    truth = [held[len(recording.cuts)][layer * heads + head] for layer in shape.global_layers for head in range(heads)]
    assert [set(lane) for lane in last] == [{place for place in lane if place < seen} for lane in truth]


def test_an_end_token_ends_the_answer(model):
    whole, _ = run(model, "h2o")
    end = whole.ids[PROMPT + 5]
    short = record(model, granted(model, "h2o"), prompt_ids(), NEW, frozenset({end}))
    assert short.ids == whole.ids[: whole.ids.index(end, PROMPT) + 1]
    assert short.dropped_at.shape[2] == len(short.ids) - 1


def test_the_figures(model):
    recording, _ = run(model, "h2o")
    assert recording.allocated_bytes == granted(model, "h2o").bytes
    figures = {figure["name"]: figure for figure in Parts(rendered(recording)).data["figures"]}
    # Two layers of two KV heads with keys and values of 8 float32 elements.
    assert recording.own_full_bytes == 2 * 2 * (PROMPT + NEW) * 2 * 8 * 4
    assert figures["compression"]["value"] == f"{recording.own_full_bytes / recording.allocated_bytes:.2f}x"
    assert figures["evictions"]["value"] == str(len(recording.cuts))
    assert figures["attention mass dropped"]["value"] == f"{recording.mass_dropped:.1%}"
    assert figures["budget"] == {"name": "budget", "value": "30%", "note": "60 slots per layer and KV head"}
    assert "sinks 4" in figures["policy"]["note"]


def test_texts_cannot_break_out(model):
    recording, _ = run(model, "h2o")
    texts = HOSTILE + ["x"] * (len(recording.ids) - len(HOSTILE))
    plain, hostile = Parts(rendered(recording)), Parts(rendered(recording, texts, model=HOSTILE[0]))
    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    assert hostile.data["texts"] == texts
    assert hostile.texts["title", None] == f"What {HOSTILE[0]} remembers"


def test_the_page_reaches_nothing_and_runs_nothing_but_its_own_script(model):
    recording, _ = run(model, "h2o")
    parts = Parts(rendered(recording))
    assert [name for _, name, _ in parts.attributes if name in ("src", "href", "action") or name.startswith("on")] == []
    policy = next(value for tag, name, value in parts.attributes if value and value.startswith("default-src"))
    assert policy.startswith("default-src 'none';")
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(parts.texts[tag, None].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_a_long_page_stays_small():
    layers, heads, tokens, cuts = 30, 3, 2000, 100
    numbers = EvictionParameters(recent=100, sinks=4, drop=16, lookahead=8, chunk=64, window=0)
    random = np.random.default_rng(0)
    recording = Recording(
        ids=tuple(range(tokens)),
        prompt=tokens - 100,
        grant=Grant("h2o", "default", (400,) * layers, numbers, bytes=1),
        shape=ModelShape(layers, heads, head_dim=64, element_bytes=4),
        allocated_bytes=1,
        cuts=tuple(Cut(400 + 16 * cut, "prefill", 16 * layers * heads, random.random()) for cut in range(cuts)),
        dropped_at=random.integers(0, cuts + 1, (layers, heads, tokens - 1)).astype(np.int32),
        mass=random.random((layers, heads, tokens - 1)).astype(np.float32),
    )
    assert len(rendered(recording).encode()) < 1_000_000


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte-level", "byte-fallback"])
def test_the_texts_of_tokens_are_the_whole_text(tokenizer):
    ids = tokenizer("Hello é world 🦙.", add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, [*ids, tokenizer.eos_token_id])
    assert "".join(texts) == tokenizer.decode(ids) + "</s>"
    assert "🦙" in texts
    assert texts[texts.index("🦙") - 3 : texts.index("🦙")] == [""] * 3
    # A character that never becomes whole is shown as it is decoded.
    assert set(token_texts(tokenizer, ids[:-2])[-1]) == {"\N{REPLACEMENT CHARACTER}"}
