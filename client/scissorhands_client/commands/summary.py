"""What an answer cost: as a table for people and as JSON for programs."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from enum import Enum
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table

from scissorhands.formats import EXACT
from scissorhands_client.quality import Quality, ShadowResult
from scissorhands_client.types import BudgetSource, CacheStatistics, Grant, GrantSource, Result, Usage

_GRANTED_BY = {
    GrantSource.MANAGER: "granted by the manager",
    GrantSource.LOCAL: "granted by the worker: no manager answered",
}

_SHARED_BY = {
    BudgetSource.PROFILE: "heads share by a profile",
    BudgetSource.MEASURED: "heads share by what the manager measured",
}

_NOT_COMPARED = {
    ShadowResult.NO_MEMORY: "it did not fit into the memory that the worker sets aside",
    ShadowResult.LATE: "it was not done in time",
    ShadowResult.FAILED: "its forward pass failed; see the worker's log",
}


def summary_table(result: Result) -> Table:
    """Return everything that was used and dropped, as a table."""
    usage, cache, accepted = result.finish.usage, result.finish.cache, result.accepted
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("Tokens", f"{usage.prompt_tokens:,} prompt, {usage.generated_tokens:,} generated ({_ended(result)})")
    if accepted.resumed_tokens:
        table.add_row("Resumed", f"{accepted.resumed_tokens:,} tokens of the prompt, not read again")
    if usage.prefix_tokens:
        table.add_row("Shared prefix", f"{usage.prefix_tokens:,} tokens of the prompt, not read again")
    table.add_row("Budget", budget_text(accepted.grant))
    table.add_row("Full cache", f"{decimal(cache.full_bytes)} ({decimal(cache.full_16bit_bytes)} in 16 bits)")
    table.add_row("Allocated", decimal(cache.allocated_bytes))
    table.add_row("Compression", _compression(cache))
    table.add_row("Evicted", f"{cache.evicted_slots:,} slots in {cache.evictions:,} evictions")
    table.add_row("Attention mass dropped", f"{cache.mass_dropped:.2%}")
    for name, text in quality_rows(result.finish.quality):
        table.add_row(name, text)
    table.add_row("Plans", f"{cache.plans_manager:,} from the manager, {cache.plans_local:,} local")
    table.add_row("Prefill stall", f"{cache.prefill_stall_seconds:.3f} s")
    table.add_row(
        "Segments", f"{cache.segments:,} offloaded ({decimal(cache.segment_bytes)}), {cache.segments_dropped:,} dropped"
    )
    if cache.recalled_slots:
        table.add_row("Recalled", f"{cache.recalled_slots:,} slots, chosen from {cache.recalled_sections:,} sections")
    if cache.recall_misses:
        missed = ", ".join(f"{count:,} {reason}" for reason, count in cache.recall_misses.items())
        table.add_row("Not recalled", missed)
    if cache.suspended_bytes:
        table.add_row("Kept", f"{decimal(cache.suspended_bytes)} in the store, for the next turn")
    table.add_row("Speed", _speed(usage))
    table.add_row(
        "First token", f"after {usage.time_to_first_token_seconds:.3f} s, {usage.queue_seconds:.3f} s of it queued"
    )
    if accepted.seed is not None:
        table.add_row("Seed", str(accepted.seed))
    table.add_row("Session", accepted.session_id)
    return table


def summary_line(result: Result) -> str:
    """Return the most important numbers in one line."""
    usage, cache = result.finish.usage, result.finish.cache
    parts = [f"{usage.prompt_tokens:,} + {usage.generated_tokens:,} tokens", _speed(usage)]
    if result.accepted.resumed_tokens:
        parts.append(f"{result.accepted.resumed_tokens:,} resumed")
    if usage.prefix_tokens:
        parts.append(f"{usage.prefix_tokens:,} of a shared prefix")
    if cache.compression_16bit is not None:
        parts.append(f"{decimal(cache.allocated_bytes)} ({cache.compression_16bit:.2f}x smaller than 16 bits)")
    parts.append(f"{cache.mass_dropped:.2%} of attention dropped")
    divergence = result.finish.quality.divergence
    if divergence is not None:
        parts.append(f"{divergence.nats:.4f} nats from the full cache")
    return ", ".join(parts)


def result_object(result: Result) -> dict[str, Any]:
    """Return everything about an answer; times in seconds, sizes in bytes."""
    finish, accepted = result.finish, result.accepted
    cache = asdict(finish.cache)
    cache["compression"] = finish.cache.compression
    cache["compression_16bit"] = finish.cache.compression_16bit
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": finish.reason,
        "stop": finish.stop,
        "session_id": accepted.session_id,
        "resumed_tokens": accepted.resumed_tokens,
        "seed": accepted.seed,
        "max_new_tokens": accepted.max_new_tokens,
        "queued_ahead": accepted.queued_ahead,
        "grant": asdict(accepted.grant),
        "usage": asdict(finish.usage) | {"tokens_per_second": finish.usage.tokens_per_second},
        "cache": cache,
        "quality": asdict(finish.quality),
    }


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON; enumerations by value, moments in ISO 8601."""
    return json.dumps(value, default=_plain, indent=indent, ensure_ascii=False)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"no JSON for {type(value).__name__}")


def _ended(result: Result) -> str:
    finish = result.finish
    return f"stopped at {finish.stop!r}" if finish.stop else f"ended by {finish.reason.value}"


def quality_rows(quality: Quality) -> Iterator[tuple[str, str]]:
    """Yield what is known of the cost of eviction: names and texts."""
    if quality.recent_mass_dropped is not None and quality.recent_mass_dropped_peak is not None:
        yield (
            "Recent attention dropped",
            f"{quality.recent_mass_dropped:.2%} an eviction on average, {quality.recent_mass_dropped_peak:.2%} at most",
        )
    if quality.persistence is not None:
        yield "Importance persisted", f"{quality.persistence:.0%} (50% is chance)"
    if quality.divergence is not None:
        compared = quality.divergence
        same = f"the same choice at {compared.same_share:.1%} of {compared.tokens:,} tokens"
        yield "Against a full cache", f"{compared.nats:.4f} nats a token, {same}"
    elif quality.shadow in _NOT_COMPARED:
        yield "Against a full cache", f"not compared: {_NOT_COMPARED[quality.shadow]}"


def budget_text(grant: Grant) -> str:
    """Return a grant in words."""
    slots = sorted({*grant.layer_slots})
    amount = f"{slots[0]:,}" if len(slots) == 1 else f"{slots[0]:,} to {slots[-1]:,}" if slots else "no"
    policy = f"{grant.policy}:{grant.preset}" if grant.preset else grant.policy
    parts = [f"{amount} slots per layer and KV head", policy]
    packed = sorted({*grant.resident_codecs} - {EXACT})
    if packed:
        parts.append(f"resident in {packed[0] if len(packed) == 1 else f'{len(packed)} formats, such as {packed[0]}'}")
    if grant.raised:
        parts.append("raised to the smallest")
    if grant.budget_source in _SHARED_BY:
        parts.append(_SHARED_BY[grant.budget_source])
    if grant.source in _GRANTED_BY:
        parts.append(_GRANTED_BY[grant.source])
    return ", ".join(parts)


def _compression(cache: CacheStatistics) -> str:
    if cache.compression is None or cache.compression_16bit is None:
        return "unknown"
    return f"{cache.compression_16bit:.2f}x against 16 bits, {cache.compression:.2f}x against its own number type"


def _speed(usage: Usage) -> str:
    rate = usage.tokens_per_second
    return "too few tokens for a speed" if rate is None else f"{rate:.1f} tokens/s"
