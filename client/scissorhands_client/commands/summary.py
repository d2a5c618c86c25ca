"""What an answer cost: as a table for people and as JSON for programs."""

import json
from dataclasses import asdict
from datetime import datetime
from enum import Enum
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table

from scissorhands_client.types import CacheStatistics, Grant, GrantSource, Result, Usage

_GRANTED_BY = {
    GrantSource.MANAGER: "granted by the manager",
    GrantSource.LOCAL: "granted by the worker: no manager answered",
}


def summary_table(result: Result) -> Table:
    """Return everything that was used and dropped, as a table."""
    usage, cache, accepted = result.finish.usage, result.finish.cache, result.accepted
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("Tokens", f"{usage.prompt_tokens:,} prompt, {usage.generated_tokens:,} generated ({_ended(result)})")
    table.add_row("Budget", budget_text(accepted.grant))
    table.add_row("Full cache", f"{decimal(cache.full_bytes)} ({decimal(cache.full_16bit_bytes)} in 16 bits)")
    table.add_row("Allocated", decimal(cache.allocated_bytes))
    table.add_row("Compression", _compression(cache))
    table.add_row("Evicted", f"{cache.evicted_slots:,} slots in {cache.evictions:,} evictions")
    table.add_row("Attention mass dropped", f"{cache.mass_dropped:.2%}")
    table.add_row("Plans", f"{cache.plans_manager:,} from the manager, {cache.plans_local:,} local")
    table.add_row("Prefill stall", f"{cache.prefill_stall_seconds:.3f} s")
    table.add_row(
        "Segments", f"{cache.segments:,} offloaded ({decimal(cache.segment_bytes)}), {cache.segments_dropped:,} dropped"
    )
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
    if cache.compression_16bit is not None:
        parts.append(f"{decimal(cache.allocated_bytes)} ({cache.compression_16bit:.2f}x smaller than 16 bits)")
    parts.append(f"{cache.mass_dropped:.2%} of attention dropped")
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
        "seed": accepted.seed,
        "max_new_tokens": accepted.max_new_tokens,
        "queued_ahead": accepted.queued_ahead,
        "grant": asdict(accepted.grant),
        "usage": asdict(finish.usage) | {"tokens_per_second": finish.usage.tokens_per_second},
        "cache": cache,
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


def budget_text(grant: Grant) -> str:
    """Return a grant in words."""
    slots = sorted({*grant.layer_slots})
    amount = f"{slots[0]:,}" if len(slots) == 1 else f"{slots[0]:,} to {slots[-1]:,}" if slots else "no"
    policy = f"{grant.policy}:{grant.preset}" if grant.preset else grant.policy
    parts = [f"{amount} slots per layer and KV head", policy]
    if grant.raised:
        parts.append("raised to the smallest")
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
