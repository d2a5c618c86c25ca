"""Slots that are resident packed: attention in the codec's basis, eviction without encoding anew, and real savings."""

import pytest
import torch
from support.codec_data import HEADS, codec_of, statistics
from support.tiny_models import random_tokens, tiny_model

from scissorhands import attended
from scissorhands.archive import encode_segment
from scissorhands.attention import attend
from scissorhands.budget import BudgetRequest, Grant
from scissorhands.cache import ResidentCache
from scissorhands.codec import get_codec
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import parse
from scissorhands.grant import COMMON_EVIDENCE_BYTES, PolicyRequest, codecs_text, grant
from scissorhands.layer_pool import LayerCodec, LayerPool
from scissorhands.new_tokens import NewTokens
from scissorhands.probe import model_shape, probe
from scissorhands.row import Row
from scissorhands.segment import SegmentIdentity, check_segment
from scissorhands.span import Span
from scissorhands.step import ModelStep

FORMATS = ["int8", "int4", "int4-hadamard", "turboquant:k3v2", "klt:k4v3", "block-gtq:3"]
HEAD_DIM, SLOTS = 64, 40
CPU = torch.device("cpu")
FORTY = BudgetRequest.tokens(40)
TEXTS = dict.fromkeys(SegmentIdentity.__annotations__, "x")


def pool_of(name: str) -> LayerPool:
    codec = codec_of(name, HEAD_DIM)
    return LayerPool(2, HEADS, SLOTS, HEAD_DIM, (), torch.float32, CPU, LayerCodec(codec.keys, codec.values))


@pytest.mark.parametrize("tile", [attended.TILE, 3 * 2 * HEADS * HEAD_DIM], ids=["whole", "three_slots"])
@pytest.mark.parametrize("name", FORMATS)
def test_attention_is_that_of_the_decoded_slots(name, tile, monkeypatch):
    monkeypatch.setattr(attended, "TILE", tile)
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, n, 20, HEAD_DIM, generator=generator) for n in (2 * HEADS, HEADS, HEADS))
    pool, codec = pool_of(name), codec_of(name, HEAD_DIM)
    done = []
    for part in (slice(0, 13), slice(13, 14), slice(14, 20)):
        span = Span(slice(0, 2), (part.start,) * 2, (part.start,) * 2, part.stop - part.start, CPU)
        new = NewTokens(query[:, :, part], keys[:, :, part], values[:, :, part], scaling=0.3)
        done.append(attend(pool, span, new, observe=False))
    found = torch.cat(done, dim=2)
    stored = [
        side.decode(side.encode(exact), 20, HEAD_DIM, torch.float32).repeat_interleave(2, dim=1)
        for side, exact in ((codec.keys, keys), (codec.values, values))
    ]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *stored, is_causal=True, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Decoding:
    """Rows of a tiny model that decode under a grant."""

    def __init__(self, codec: str, rows: int, budget: BudgetRequest = FORTY) -> None:
        self.model = tiny_model("llama_grouped")
        probe(self.model)
        self.shape = model_shape(self.model)
        self.grant = grant(budget, PolicyRequest("h2o"), self.shape, 100, codec=codec)
        own = statistics(self.shape.head_dim, self.shape.layers * self.shape.kv_heads)
        self.cache = ResidentCache(self.shape, torch.float32, CPU, statistics=own)
        self.rows = [self.cache.add_row(self.grant) for _ in range(rows)]
        self.evictions = []

    @torch.inference_mode()
    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append ``[rows, n]`` tokens one by one; return the last logits."""
        step, logits = ModelStep(self.model), torch.empty(0)
        for column in tokens.T:
            self.evictions += [taken for row in self.rows if (taken := self.cache.prepare_decode(row))]
            logits = step(self.rows, column.unsqueeze(1).tolist())
        return logits


def tokens_of(rows: int, count: int) -> torch.Tensor:
    """Return ``[rows, count]`` tokens."""
    return torch.stack([random_tokens(count, seed=row) for row in range(rows)])


def held(row: Row) -> dict[tuple[int, int, int], bytes]:
    """Return the bytes of every slot of a row, by layer, head and position."""
    found = {}
    for index, layer in enumerate(row.pool.layers):
        for head in range(layer.positions.shape[1]):
            for slot in range(row.lengths[index]):
                position = int(layer.positions[row.index, head, slot])
                parts = (tensor[row.index, head, slot].numpy().tobytes() for tensor in (layer.keys, layer.values))
                found[index, head, position] = b"".join(parts)
    return found


@pytest.mark.parametrize("name", ["int4", "klt:k4v4"])
def test_a_token_is_encoded_once_and_its_bytes_stay_through_evictions(name):
    decoding = Decoding(name, 1)
    tokens = tokens_of(1, 90)
    seen: dict[tuple[int, int, int], bytes] = {}
    for column in range(tokens.shape[1]):
        decoding.feed(tokens[:, column : column + 1])
        for slot, data in held(decoding.rows[0]).items():
            assert seen.setdefault(slot, data) == data
    assert len(decoding.evictions) > 2
    assert len(seen) == 90 * decoding.shape.layers * decoding.shape.kv_heads


@pytest.mark.parametrize("name", ["int4-hadamard", "turboquant:k4v3", "klt:k4v4"])
def test_alone_and_in_a_batch_the_same_slots_are_held(name):
    tokens = tokens_of(3, 70)
    batch = Decoding(name, 3)
    batch.feed(tokens)
    alone = Decoding(name, 1)
    alone.feed(tokens[1:2])
    assert held(alone.rows[0]).keys() == held(batch.rows[1]).keys()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_granted_is_what_is_allocated(name):
    decoding = Decoding(name, 2)
    shape, found = decoding.shape, parse(name)
    slot = found.key_bytes(shape.head_dim, 4) + found.value_bytes(shape.head_dim, 4) + COMMON_EVIDENCE_BYTES
    assert decoding.grant.bytes == 40 * shape.layers * shape.kv_heads * slot
    assert decoding.cache.allocated_bytes() == 2 * decoding.grant.bytes
    assert codecs_text(decoding.grant) == found.name
    assert all(layer.keys.dtype == torch.uint8 for layer in decoding.rows[0].pool.layers)
    assert slot < shape.slot_bytes + COMMON_EVIDENCE_BYTES


def test_a_compression_becomes_slots():
    decoding = Decoding("int4", 1, BudgetRequest.compression(3))
    full = decoding.shape.full_bytes(100, 2)
    assert full / 3.4 < decoding.cache.allocated_bytes() <= full / 3


def test_evicted_slots_are_stored_as_they_are():
    decoding = Decoding("turboquant:k4v3", 1)
    tokens = tokens_of(1, 60)
    seen = {}
    for column in range(tokens.shape[1]):
        decoding.feed(tokens[:, column : column + 1])
        seen |= held(decoding.rows[0])
    eviction, shape = decoding.evictions[0], decoding.shape
    codec = get_codec(codecs_text(decoding.grant), shape.head_dim)
    data = encode_segment(SegmentIdentity(**TEXTS), 0, 40, eviction.layers, codec, shape.head_dim)
    header = check_segment(data)
    for index, section in enumerate(header.sections):
        layer, head = divmod(index, shape.kv_heads)
        slots = eviction.layers[layer]
        stored = data[section.offset : section.offset + section.size][4 * section.slots :]
        rows = [seen[layer, head, int(position)] for position in slots.positions[head]]
        width = codec.format.key_bytes(shape.head_dim, 4)
        assert stored == b"".join(row[:width] for row in rows) + b"".join(row[width:] for row in rows)


def of_policy(policy: str, codec: str) -> Grant:
    shape = model_shape(tiny_model("llama_grouped"))
    return grant(BudgetRequest.tokens(60), PolicyRequest(policy), shape, 100, codec=codec)


@pytest.mark.parametrize(
    ("policy", "codec", "reason"),
    [
        ("r-kv", "int4", "policy r-kv reads keys and values"),
        ("expected-attention", "int8", "policy expected-attention reads keys and values"),
        ("h2o", "kivi:4", "cannot be resident"),
        ("h2o", "zip", "unknown codec 'zip'"),
        ("scissorhands", "planned", "needs a model's profile"),
    ],
)
def test_what_cannot_be_packed_is_refused(policy, codec, reason):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        of_policy(policy, codec)
    assert caught.value.field == "codec"


def test_a_model_without_statistics_is_refused_a_codec_that_needs_them():
    model = tiny_model("llama_grouped")
    cache = ResidentCache(model_shape(model), torch.float32, CPU)
    with pytest.raises(InvalidRequestError, match="run scissorhands calibrate"):
        cache.add_row(of_policy("h2o", "klt:4"))
    assert not cache.rows
    assert cache.allocated_bytes() == 0
