"""Between the client's types and the protocol's messages."""

from collections.abc import Mapping
from datetime import UTC

from google.protobuf.duration_pb2 import Duration

from scissorhands.budget import BudgetUnit
from scissorhands.v1 import budget_pb2, cache_manager_pb2, generation_pb2, model_pb2, recall_pb2, suspension_pb2
from scissorhands_client.budget import Budget
from scissorhands_client.errors import InvalidRequestError
from scissorhands_client.quality import read_quality
from scissorhands_client.records import (
    MeasuredProfile,
    ModelInfo,
    SegmentInfo,
    ServedModel,
    Session,
    SessionState,
    SuspendedRow,
)
from scissorhands_client.stored import read_object
from scissorhands_client.types import (
    Accepted,
    BudgetSource,
    CacheStatistics,
    Delta,
    Event,
    Finish,
    FinishReason,
    GenerateOptions,
    Grant,
    GrantSource,
    Policy,
    PrefillProgress,
    Priority,
    Prompt,
    TokenIds,
    Usage,
)

_GRANT_SOURCES = {
    budget_pb2.GRANT_SOURCE_MANAGER: GrantSource.MANAGER,
    budget_pb2.GRANT_SOURCE_LOCAL: GrantSource.LOCAL,
}
_BUDGET_SOURCES = {
    budget_pb2.BUDGET_SOURCE_EQUAL: BudgetSource.EQUAL,
    budget_pb2.BUDGET_SOURCE_PROFILE: BudgetSource.PROFILE,
    budget_pb2.BUDGET_SOURCE_MEASURED: BudgetSource.MEASURED,
}
_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_EOS: FinishReason.EOS,
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_PRIORITIES = {
    Priority.LOW: generation_pb2.PRIORITY_LOW,
    Priority.NORMAL: generation_pb2.PRIORITY_NORMAL,
    Priority.HIGH: generation_pb2.PRIORITY_HIGH,
}
_SESSION_STATES = {
    cache_manager_pb2.SESSION_STATE_OPEN: SessionState.OPEN,
    cache_manager_pb2.SESSION_STATE_CLOSED: SessionState.CLOSED,
    cache_manager_pb2.SESSION_STATE_EXPIRED: SessionState.EXPIRED,
    cache_manager_pb2.SESSION_STATE_STORED: SessionState.STORED,
}
_STATE_NUMBERS: dict[SessionState | None, cache_manager_pb2.SessionState.ValueType] = {
    state: number for number, state in _SESSION_STATES.items()
}


def generate_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """Write a request.

    Raises:
        InvalidRequestError: A number does not fit the protocol. All other checks are the server's.
    """
    stop = [options.stop] if isinstance(options.stop, str) else options.stop
    request = generation_pb2.GenerateRequest(
        model=options.model,
        max_new_tokens=_unsigned("max_new_tokens", options.max_new_tokens or 0, 32),
        sampling=generation_pb2.Sampling(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=_unsigned("sampling.top_k", options.top_k, 32),
            repetition_penalty=options.repetition_penalty,
            seed=None if options.seed is None else _unsigned("sampling.seed", options.seed, 64),
        ),
        stop=[_text("stop", each) for each in stop],
        ignore_eos=options.ignore_eos,
        budget=None if options.budget is None else _budget_message(options.budget),
        policy=_policy_message(options.policy),
        shadow=options.shadow,
        resident_codec=_text("resident_codec", options.resident_codec),
        session_id=_text("session_id", options.session_id),
        no_prefix_cache=not options.prefix_cache,
        recall=_recall_message(options),
        priority=_PRIORITIES[options.priority],
    )
    if isinstance(prompt, str):
        request.text = _text("text", prompt)
    elif isinstance(prompt, TokenIds):
        ids = [_unsigned("tokens.ids", token, 32) for token in prompt.ids]
        request.tokens.CopyFrom(generation_pb2.TokenPrompt(ids=ids))
    else:
        messages = [
            generation_pb2.ChatMessage(role=each.role, content=_text("chat.messages.content", each.content))
            for each in prompt
        ]
        request.chat.CopyFrom(generation_pb2.ChatPrompt(messages=messages))
    return request


def _recall_message(options: GenerateOptions) -> recall_pb2.Recall | None:
    if options.recall is None:
        if options.recall_every:
            raise InvalidRequestError.local("recall", "must be set where recall_every is")
        return None
    return recall_pb2.Recall(
        share=options.recall, every_tokens=_unsigned("recall.every_tokens", options.recall_every, 32)
    )


def read_event(message: generation_pb2.GenerateResponse) -> Event | None:
    """Read an event; None for a kind that this client does not know."""
    kind = message.WhichOneof("event")
    if kind == "accepted":
        return _read_accepted(message.accepted)
    if kind == "prefill":
        return PrefillProgress(message.prefill.done, message.prefill.total)
    if kind == "delta":
        return Delta(message.delta.text, tuple(message.delta.token_ids))
    if kind == "finish":
        return _read_finish(message.finish)
    return None


def read_served_model(message: generation_pb2.GetModelResponse) -> ServedModel:
    """Read what a worker serves."""
    return ServedModel(
        model=_read_model(message.model),
        max_rows=message.max_rows,
        max_queued=message.max_queued,
        default_max_new_tokens=message.default_max_new_tokens,
        policies=tuple(message.policies),
        chat=message.chat,
        version=message.version,
        manager_connected=message.manager_connected,
        cache_bytes=message.cache_bytes,
        more_rows=message.more_rows,
    )


def read_session(message: cache_manager_pb2.Session) -> Session:
    """Read a session."""
    spec = message.spec
    return Session(
        session_id=spec.session_id,
        worker_id=spec.worker_id,
        model=_read_model(spec.model),
        prompt_tokens=spec.prompt_tokens,
        max_new_tokens=spec.max_new_tokens,
        budget=_read_budget(spec.budget),
        policy=_read_policy(spec.policy) if spec.HasField("policy") else None,
        grant=_read_grant(spec.grant) if spec.HasField("grant") else None,
        state=_SESSION_STATES.get(message.state, SessionState.UNSPECIFIED),
        open_time=message.open_time.ToDatetime(UTC) if message.HasField("open_time") else None,
        lease_end_time=message.lease_end_time.ToDatetime(UTC) if message.HasField("lease_end_time") else None,
        evictions=message.evictions,
        evicted_slots=message.evicted_slots,
        resident_slots=message.resident_slots,
        step=message.step,
        mass_dropped=message.mass_dropped,
        persistence=tuple(message.persistence),
        segments=tuple(
            SegmentInfo(epoch=each.epoch, step=each.step, slots=each.slots, size_bytes=each.size_bytes)
            for each in message.segments
        ),
        segment_count=message.segment_count,
        segment_bytes=message.segment_bytes,
        quality=read_quality(message.quality) if message.HasField("quality") else None,
        suspended=_read_suspended(message.suspended) if message.HasField("suspended") else None,
        stored=tuple(map(read_object, message.stored)),
    )


def _read_suspended(message: suspension_pb2.SuspendedRow) -> SuspendedRow:
    return SuspendedRow(message.step, message.size_bytes, message.paused)


def list_request(state: SessionState | None, page_size: int, page_token: str) -> cache_manager_pb2.ListSessionsRequest:
    """Write a request for one page of sessions.

    Raises:
        InvalidRequestError: The page size does not fit the protocol.
    """
    return cache_manager_pb2.ListSessionsRequest(
        page_size=_unsigned("page_size", page_size, 32),
        page_token=page_token,
        state=_STATE_NUMBERS.get(state, cache_manager_pb2.SESSION_STATE_UNSPECIFIED),
    )


def read_measured(message: cache_manager_pb2.GetMeasuredProfileResponse) -> MeasuredProfile:
    """Read what was measured of a model."""
    return MeasuredProfile(
        model=message.profile.model,
        model_name=message.model_name,
        layers=message.layers,
        kv_heads=message.kv_heads,
        pairs=message.pairs,
        shares=tuple(message.profile.shares),
        losses=tuple(message.profile.losses),
    )


def _budget_message(budget: Budget) -> budget_pb2.Budget:
    if budget.unit is BudgetUnit.FRACTION:
        return budget_pb2.Budget(fraction=budget.amount)
    if budget.unit is BudgetUnit.COMPRESSION:
        return budget_pb2.Budget(compression=budget.amount)
    if budget.unit is BudgetUnit.BYTES:
        return budget_pb2.Budget(bytes=int(budget.amount))
    return budget_pb2.Budget(tokens=int(budget.amount))


def _policy_message(policy: Policy | str | None) -> budget_pb2.Policy | None:
    if policy is None:
        return None
    asked = Policy.parse(policy) if isinstance(policy, str) else policy
    parameters: Mapping[str, int] = {
        name: _unsigned(f"policy.parameters.{name}", value, 32) for name, value in asked.parameters.items()
    }
    return budget_pb2.Policy(name=asked.name, preset=asked.preset, parameters=parameters)


def _unsigned(field: str, value: int, bits: int) -> int:
    if not 0 <= value < 2**bits:
        raise InvalidRequestError.local(field, f"must be between 0 and {2**bits - 1}, got {value}")
    return value


def _text(field: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError.local(field, "is not valid Unicode text; decode it as UTF-8 first") from None
    return value


def _read_budget(message: budget_pb2.Budget) -> Budget | None:
    unit = message.WhichOneof("amount")
    return None if unit is None else Budget(BudgetUnit(unit), getattr(message, unit))


def _read_policy(message: budget_pb2.Policy) -> Policy:
    return Policy(message.name, message.preset, dict(message.parameters))


def _read_grant(message: budget_pb2.Grant) -> Grant:
    names = message.resident_codecs
    return Grant(
        policy=message.policy,
        preset=message.preset,
        layer_slots=tuple(message.layer_slots),
        drop=message.drop,
        lookahead=message.lookahead,
        chunk=message.chunk,
        recent=message.recent,
        sinks=message.sinks,
        window=message.window,
        bytes=message.bytes,
        raised=message.raised,
        source=_GRANT_SOURCES.get(message.source, GrantSource.UNSPECIFIED),
        codec=message.codec,
        lease_seconds=_seconds(message.lease),
        tail=message.tail,
        by_head=message.by_head,
        budget_source=_BUDGET_SOURCES.get(message.budget_source, BudgetSource.UNSPECIFIED),
        resident_codecs=tuple(names[index] for index in message.resident_codec_indices if index < len(names)),
    )


def _read_accepted(message: generation_pb2.Accepted) -> Accepted:
    return Accepted(
        session_id=message.session_id,
        prompt_tokens=message.prompt_tokens,
        grant=_read_grant(message.grant),
        max_new_tokens=message.max_new_tokens,
        queued_ahead=message.queued_ahead,
        seed=message.seed if message.HasField("seed") else None,
        resumed_tokens=message.resumed_tokens,
    )


def _read_finish(message: generation_pb2.Finish) -> Finish:
    usage, cache = message.usage, message.cache
    return Finish(
        reason=_FINISH_REASONS.get(message.reason, FinishReason.UNSPECIFIED),
        stop=message.stop,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.generated_tokens,
            queue_seconds=_seconds(usage.queue_time),
            time_to_first_token_seconds=_seconds(usage.time_to_first_token),
            decode_seconds=_seconds(usage.decode_time),
            prefix_tokens=usage.prefix_tokens,
        ),
        cache=CacheStatistics(
            full_bytes=cache.full_bytes,
            allocated_bytes=cache.allocated_bytes,
            full_16bit_bytes=cache.full_16bit_bytes,
            evictions=cache.evictions,
            evicted_slots=cache.evicted_slots,
            mass_dropped=cache.mass_dropped,
            plans_manager=cache.plans_manager,
            plans_local=cache.plans_local,
            prefill_stall_seconds=_seconds(cache.prefill_stall),
            segments=cache.segments,
            segment_bytes=cache.segment_bytes,
            segments_dropped=cache.segments_dropped,
            suspended_bytes=cache.suspended_bytes,
            recalled_slots=cache.recalled_slots,
            recalled_sections=cache.recalled_sections,
            recall_misses={miss.reason: miss.count for miss in cache.recall_misses},
        ),
        quality=read_quality(message.quality),
    )


def _read_model(message: model_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        fingerprint=message.fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        architecture=message.architecture,
        dtype=message.dtype,
        layers=message.layers,
        query_heads=message.query_heads,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        max_positions=message.max_positions,
        vocabulary=message.vocabulary,
        element_bytes=message.element_bytes,
    )


def _seconds(message: Duration) -> float:
    # Not ToTimedelta: it raises beyond its range, and a server's number must not break the reading of an answer.
    return float(message.seconds) + message.nanos / 1e9
