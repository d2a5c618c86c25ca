"""Sessions, snapshots and segments to send to a manager."""

import numpy as np

from scissorhands.plan import plan
from scissorhands.plan_wire import plan_requests, read_plan, snapshot_parts
from scissorhands.segment import SegmentIdentity, build_segment
from scissorhands.snapshot import LayerEvidence, Snapshot
from scissorhands.v1 import budget_pb2, cache_manager_pb2, model_pb2
from scissorhands.wire import policy_message, policy_request, read_grant

FINGERPRINT = "f" * 64


def model(**changes):
    sizes = {
        "name": "tiny",
        "fingerprint": FINGERPRINT,
        "dtype": "float32",
        "layers": 2,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "max_positions": 100_000,
        "element_bytes": 4,
    }
    return model_pb2.ModelInfo(**{**sizes, **changes})


def spec(session_id="s1", policy="", prompt=900, new=100, **changes):
    message = cache_manager_pb2.SessionSpec(
        session_id=session_id,
        worker_id="w1",
        model=changes.pop("model", model()),
        prompt_tokens=prompt,
        max_new_tokens=new,
        **changes,
    )
    if policy:
        message.policy.CopyFrom(policy_message(policy_request(budget_pb2.Policy(name=policy))))
    return message


async def opened(stub, message):
    """Open a session and return its description with the grant, as workers send it from then on."""
    response = await stub.OpenSession(cache_manager_pb2.OpenSessionRequest(session=message), timeout=10)
    full = cache_manager_pb2.SessionSpec()
    full.CopyFrom(message)
    full.grant.CopyFrom(response.grant)
    return full


def snapshot(session, epoch=0, seed=0, signals=("mass",)):
    """Return a snapshot of a row that is about to evict, with evidence that is random and consistent."""
    granted = read_grant(session.grant)
    generator = np.random.default_rng(seed)
    ahead = granted.parameters.lookahead
    step = max(granted.layer_slots) * (epoch + 2)
    heads = session.model.kv_heads
    layers = []
    for slots in granted.layer_slots:
        length = slots - ahead
        positions = np.stack([np.sort(generator.permutation(step)[:length]) for _ in range(heads)])
        mass = generator.random((heads, length), dtype=np.float32)
        if epoch == 0:
            positions = np.tile(np.arange(length), (heads, 1))
            step = length
            mass *= step / mass.sum(axis=1, keepdims=True)
        low = generator.integers(0, 256, (heads, length))
        part = mass * generator.random((heads, length), dtype=np.float32)
        known = {
            "mass": mass,
            "low_count": low,
            "low_count_ring": low,
            "last_attention": part / part.sum(axis=1, keepdims=True),
            "window_mass": part,
            "token_kind": generator.integers(0, 3, (heads, length)),
            "expected_attention": part,
            "redundancy": part - mass,
            "weight": np.log1p(part),
        }
        layers.append(LayerEvidence(positions, {name: known[name] for name in signals}))
    return Snapshot(epoch, step, ahead, 1, tuple(layers), prompt=step // 2)


def signals_of(policy):
    """Return the signals that a policy's snapshots carry."""
    own = {
        "scissorhands:counts": ("low_count",),
        "scissorhands:paper": ("low_count_ring",),
        "tova": ("last_attention",),
        "snapkv": ("window_mass",),
        "r-kv": ("window_mass", "redundancy"),
        "fastgen": ("token_kind",),
        "expected-attention": ("expected_attention",),
        "protected:tova": ("last_attention",),
        "merged:h2o": ("weight",),
    }
    return ("mass", *own.get(policy, ()))


def plan_parts(evidence, session):
    """Return the parts of a snapshot, one a layer."""
    return list(snapshot_parts(evidence, session, part_bytes=1))


def requests_of(parts):
    """Return the messages of parts, one each."""
    return [cache_manager_pb2.PlanEvictionsRequest(parts=[part]) for part in parts]


async def planned_all(stub, *pairs, timeout=60):
    """Return the results of some ``(evidence, session)`` in one call."""
    return (await stub.PlanEvictions(plan_requests(pairs), timeout=timeout)).results


async def planned(stub, session, evidence, timeout=60):
    """Return the plan of one snapshot."""
    (result,) = await planned_all(stub, (evidence, session), timeout=timeout)
    assert result.WhichOneof("result") == "plan", result.failure
    return result.plan


def same_plan(response, session, evidence):
    """Tell whether a plan is the one that the core computes."""
    local, remote = plan(read_grant(session.grant), evidence), read_plan(response, evidence)
    assert any((~keep).any() for keep in local.keep), "nothing is evicted, so nothing is compared"
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(local.keep, remote.keep, strict=True))


def segment(session, epoch=0, sizes=(40, 0, 30, 20), **changes):
    """Return a segment of a session; ``sizes`` are the bytes of its sections, by layer, then by head."""
    identity = SegmentIdentity(
        model=session.model.fingerprint,
        tokenizer="t" * 64,
        dtype=session.model.dtype,
        policy=f"{session.grant.policy}:{session.grant.preset}",
        layer_slots=",".join(map(str, session.grant.layer_slots)),
        codec=session.grant.codec,
        codec_version="1",
        tokens="0" * 64,
        tenant="default",
        session_id=session.session_id,
    )
    identity = SegmentIdentity(**{**identity.__dict__, **changes.pop("identity", {})})
    generator = np.random.default_rng(epoch)
    shape = changes.pop("shape", (session.model.layers, session.model.kv_heads, session.model.head_dim))
    sections = [(size // 10, generator.bytes(size)) for size in sizes]
    return build_segment(identity, changes.pop("segment_epoch", epoch), 100 + epoch, shape, sections)


def upload(session, *segments, chunk=1 << 20):
    """Return the messages that offload segments, each given as ``(epoch, bytes)``."""
    messages = []
    for epoch, data in segments:
        header = cache_manager_pb2.SegmentHeader(session=session, epoch=epoch, size_bytes=len(data))
        messages.append(cache_manager_pb2.OffloadSegmentsRequest(header=header))
        pieces = [data[start : start + chunk] for start in range(0, len(data), chunk)]
        messages += [cache_manager_pb2.OffloadSegmentsRequest(chunk=piece) for piece in pieces]
    return messages


async def offload(stub, session, *segments, chunk=1 << 20):
    return await stub.OffloadSegments(iter(upload(session, *segments, chunk=chunk)), timeout=30)


async def fetch(stub, session_id, epochs=(), sections=()):
    """Fetch segments or sections and return their bytes by ``(epoch, layer, kv_head)`` or ``epoch``."""
    addresses = [cache_manager_pb2.SectionAddress(layer=layer, kv_head=head) for layer, head in sections]
    request = cache_manager_pb2.FetchSegmentsRequest(session_id=session_id, epochs=epochs, sections=addresses)
    found, open_key = {}, None
    async for part in stub.FetchSegments(request, timeout=30):
        address = (part.section.layer, part.section.kv_head) if part.HasField("section") else ()
        key = (part.epoch, *address) if address else part.epoch
        assert len(part.chunk) <= 1 << 20
        assert open_key in (None, key), "parts of two things are mixed"
        found[key] = found.get(key, b"") + part.chunk
        open_key = None if part.last else key
    assert open_key is None, "the last part is not marked"
    return found
