"""What a store is like to the manager: it is connected to, written to and read from, with the manager's own settings.

Its imports are of the manager's packages, which :mod:`scissorhands_server.doctor.store` looks for first.
"""

import asyncio
import secrets
from typing import Any

from redis.exceptions import AuthenticationError, NoPermissionError
from rich.filesize import decimal

from scissorhands.errors import ConfigurationError, StoreUnavailableError
from scissorhands_server.doctor.finding import Finding
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.settings import load_settings
from scissorhands_server.store.address import Access, StoreAddress
from scissorhands_server.store.client import Client, close_client, make_client, server_infos
from scissorhands_server.store.deadline import DeadlineStore
from scissorhands_server.store.redis import RedisStore
from scissorhands_server.store.registry import ObjectName, Registry

# Of the page that is written; it would go by itself.
_TTL_SECONDS = 10.0
_RULES = "~scissorhands:* +@read +@write +@connection +@scripting -@dangerous +cluster|slots +info +time"


def try_store(url: str, timeout: float) -> list[Finding]:
    """Return what was found at a store.

    Args:
        url: The store's.
        timeout: The most that each call may take, in seconds.
    """
    try:
        access = load_settings(ManagerSettings, {"store_url": url}).store_access
    except ConfigurationError as error:
        return [Finding.failed("store", str(error), "give redis://HOST:PORT, or another of the URLs named")]
    return asyncio.run(_try(url, access, timeout))


async def _try(url: str, access: Access, seconds: float) -> list[Finding]:
    place = str(StoreAddress.parse(url))
    store = DeadlineStore(RedisStore(url, seconds, 1, access), seconds)
    try:
        await store.ping()
        tenant = f"doctor-{secrets.token_hex(6)}"
        owner, entry = f"{tenant}/doctor", ObjectName(tenant, "row", "doctor")
        try:
            await store.put(owner, "page", b"x", _TTL_SECONDS)
            await store.commit(owner, ["page"], _TTL_SECONDS)
            await store.list_pages(owner)
            await store.delete(owner, ["page"])
            await Registry(store).add(entry, 1, 0, _TTL_SECONDS, 0.0)
            await Registry(store).take(entry)
            await store.scan("")
        except StoreUnavailableError as error:
            trouble = f"{place} answers, but: {error}"
            return [Finding.failed("store", trouble, f"free its memory, or allow the user {_RULES}")]
    except StoreUnavailableError as error:
        # redis-py has no class for a server that wants a password and was given none.
        if isinstance(error.__cause__, AuthenticationError) or "already authenticated" in str(error):
            return [
                Finding.failed("store", f"{place}: {error}", "give its password: --store-url redis://:PASSWORD@HOST")
            ]
        return [Finding.failed("store", f"{place} does not answer: {error}", "start it, or name another --store-url")]
    finally:
        await store.close()
    client = make_client(StoreAddress.parse(url), access, seconds, 1)
    try:
        return await _described(client, place)
    finally:
        await close_client(client)


async def _described(client: Client, place: str) -> list[Finding]:
    """Tell the version, and how a full memory is treated by whichever server treats it worst."""
    try:
        told = await server_infos(client)
    except NoPermissionError:
        answers = Finding.ok("store", f"{place} answers")
        return [answers, Finding.warning("store memory", "this user may not ask", "allow it +info")]
    versions = sorted({str(each.get("valkey_version") or each.get("redis_version")) for each in told})
    return [
        Finding.ok("store", f"{place} answers, version {', '.join(versions)}"),
        max((_memory_policy(each) for each in told), key=lambda finding: finding.status.value == "warning"),
    ]


def _memory_policy(information: dict[str, Any]) -> Finding:
    most, policy = int(information.get("maxmemory", 0)), information.get("maxmemory_policy", "unknown")
    if most == 0:
        return Finding.warning("store memory", "it has no limit", "set maxmemory, so that it leaves room for others")
    if policy != "noeviction":
        return Finding.warning(
            "store memory",
            f"{decimal(most)}, then {policy}: segments vanish without a word",
            "set maxmemory-policy noeviction, so that what does not fit is refused and counted",
        )
    return Finding.ok("store memory", f"{decimal(most)}, then it refuses to write")
