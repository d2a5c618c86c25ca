"""Granting: a policy and a budget become the numbers of one sequence."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from scissorhands.bit_planner import plan_bits
from scissorhands.budget import BudgetRequest, Grant, ModelShape, apply_overrides, resolve_slots
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import EXACT, parse, resident
from scissorhands.policies import get_policy
from scissorhands.policies.full import Full
from scissorhands.profile import Profile, share_out

# Evidence that every slot carries: its position (int32) and its attention mass (float32).
COMMON_EVIDENCE_BYTES = 8
# What stands for a format where the planner is to choose one for each KV head.
PLANNED = "planned"
# The budget is spent in this format first; what the planner then spends is no more.
_BEFORE_PLANNING = "klt:k4v4"
# A chunk's scores take chunk x budget numbers for every query head, and while it is read nobody else's row is stepped.
MAX_CHUNK = 1024


@dataclass(frozen=True)
class PolicyRequest:
    """The policy that a caller asks for.

    Args:
        name: Name of the policy.
        preset: Preset; empty means default.
        parameters: Numbers to override, by the names of :class:`~scissorhands.budget.EvictionParameters`.
    """

    name: str
    preset: str = ""
    parameters: dict[str, int] = field(default_factory=dict)


def default_budget(policy: PolicyRequest, fraction: float) -> BudgetRequest:
    """Return the budget of a request that names none: ``fraction``, or all for the policy that keeps everything."""
    return BudgetRequest.fraction(1.0 if policy.name == Full.name else fraction)


def grant(
    budget: BudgetRequest,
    policy: PolicyRequest,
    shape: ModelShape,
    total_tokens: int | None = None,
    profile: Profile | None = None,
    codec: str = EXACT,
) -> Grant:
    """Resolve a budget for one sequence. The manager and the worker both call this, so they agree.

    Args:
        budget: What was asked for.
        policy: The policy and its overrides.
        shape: The model's sizes.
        total_tokens: Prompt plus new tokens, or None when unknown.
        profile: What eviction costs in each KV head of the model, for policies that share the budget by it; None when
            that was not measured.
        codec: Format in which the slots of global layers are to be resident (:mod:`scissorhands.formats`), or
            :data:`PLANNED`: the profile decides how many slots each KV head gets, and in how many bits.

    Raises:
        InvalidRequestError: Something asked for is unknown, out of range or contradictory.
    """
    chosen = get_policy(policy.name, policy.preset)
    parameters_for = apply_overrides(chosen.parameters, policy.parameters)

    budget = budget.in_bytes(shape, total_tokens)
    planned = codec == PLANNED
    # Signals take the same bytes for every budget: only the window sizes them, and no window depends on B.
    evidence = COMMON_EVIDENCE_BYTES + chosen.evidence_bytes(parameters_for(1), shape.group)
    held = resident(_BEFORE_PLANNING if planned else codec)
    if held.name != EXACT and chosen.reads_vectors:
        raise InvalidRequestError(
            "codec", f"policy {chosen.name} reads keys and values, which must be resident as they are: codec none"
        )
    slot_bytes = held.slot_bytes(shape.head_dim, shape.element_bytes) + evidence
    per_token = len(shape.global_layers) * shape.kv_heads * slot_bytes
    # A sliding layer needs its window and nothing more, and its slots carry no evidence.
    windows = [min(window, total_tokens or window) for window in shape.layer_windows]
    fixed = sum(windows) * shape.kv_heads * shape.slot_bytes
    slots, raised = resolve_slots(budget, parameters_for, per_token, total_tokens, fixed)
    if chosen.name == Full.name and total_tokens is not None and slots < total_tokens:
        raise InvalidRequestError(
            "budget", f"policy full keeps every token and needs {total_tokens} slots, got {slots}"
        )
    if parameters_for(slots).chunk > MAX_CHUNK:
        raise InvalidRequestError(
            "policy.parameters.chunk", f"must be at most {MAX_CHUNK}: a chunk is read in one piece"
        )
    chosen.check(parameters_for(slots))
    even = Grant(
        policy=chosen.name,
        preset=chosen.preset,
        layer_slots=tuple(window or slots for window in windows or (0,) * shape.layers),
        parameters=parameters_for(slots),
        bytes=fixed + slots * per_token,
        raised=raised,
        codecs=_codecs(held.name, windows or [0] * shape.layers),
    )
    if planned:
        return _planned(even, shape, profile, slots, slot_bytes, evidence, total_tokens)
    if profile is None or not chosen.shares_by_loss:
        return even
    return _by_loss(even, shape, profile, slots, slot_bytes, total_tokens)


def _by_loss(
    even: Grant, shape: ModelShape, profile: Profile, slots: int, slot_bytes: int, total_tokens: int | None
) -> Grant:
    """Return a grant of no more bytes, its global layers' slots shared between their KV heads by what they save.

    Raises:
        InvalidRequestError: The profile is of a model of another shape.
    """
    profile.check_size(shape.layers, shape.kv_heads)
    shared = shape.split().global_layers
    found = share_out(profile, shared, slots, even.parameters.smallest_layer, total_tokens)
    codecs = tuple(codec for codec in even.codecs for _ in range(shape.kv_heads))
    unspent = (slots * len(shared) - sum(found)) * slot_bytes
    return _of_heads(even, shape, found, codecs, even.bytes - unspent)


def _planned(
    even: Grant,
    shape: ModelShape,
    profile: Profile | None,
    slots: int,
    slot_bytes: int,
    evidence: int,
    total_tokens: int | None,
) -> Grant:
    """Return a grant of no more bytes, slots and bits of each KV head chosen by what they save.

    Raises:
        InvalidRequestError: There is no profile, it is of a model of another shape, or there is no length.
    """
    if profile is None or total_tokens is None:
        raise InvalidRequestError(
            "codec", f"{PLANNED} needs a model's profile (run scissorhands calibrate) and a sequence's length"
        )
    profile.check_size(shape.layers, shape.kv_heads)
    shared = shape.split().global_layers
    spent = slots * slot_bytes * len(shared)
    plans = plan_bits(profile, shape, spent, evidence, slots, even.parameters.smallest_layer, total_tokens)
    taken = sum(
        plan.slots * (parse(plan.codec).slot_bytes(shape.head_dim, shape.element_bytes) + evidence) for plan in plans
    )
    chosen = dict(zip(shared, (plan.codec for plan in plans), strict=True))
    codecs = tuple(chosen.get(head, EXACT) for head in range(shape.split().layers))
    return _of_heads(even, shape, [plan.slots for plan in plans], codecs, even.bytes - spent + taken)


def _of_heads(even: Grant, shape: ModelShape, slots: Sequence[int], codecs: tuple[str, ...], bytes_: int) -> Grant:
    """Return a grant with budgets by head: ``slots`` of each KV head of the global layers, a window of the others."""
    own = [layer for layer in even.layer_slots for _ in range(shape.kv_heads)]
    for head, given in zip(shape.split().global_layers, slots, strict=True):
        own[head] = given
    return replace(even, layer_slots=tuple(own), bytes=bytes_, by_head=True, codecs=codecs)


def _codecs(name: str, windows: list[int]) -> tuple[str, ...]:
    """Return the format of each layer; nothing if all are as they are."""
    return () if name == EXACT else tuple(EXACT if window else name for window in windows)


def grant_text(granted: Grant) -> str:
    """Return a grant's policy and all its numbers as text, equal for equal grants."""
    numbers = " ".join(f"{name}={value}" for name, value in sorted(asdict(granted.parameters).items()))
    if granted.by_head:
        numbers += f" budgets={slots_text(granted)}"
    if granted.codecs:
        numbers += f" resident={codecs_text(granted)}"
    return f"{granted.policy}:{granted.preset} {numbers}"


def codecs_text(granted: Grant) -> str:
    """Return a grant's resident formats as text, equal for equal ones: the name of one, or a digest of several."""
    names = {codec for codec in granted.codecs if codec != EXACT}
    return names.pop() if len(names) == 1 else _digest(granted.codecs)


def slots_text(granted: Grant) -> str:
    """Return a grant's budgets as text, equal for equal ones: one a layer, or a digest of those of all KV heads."""
    if not granted.by_head:
        return ",".join(map(str, granted.layer_slots))
    return _digest(granted.layer_slots)


def _digest(entries: tuple[object, ...]) -> str:
    # Thousands of entries would not fit where this text is kept.
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:16]
