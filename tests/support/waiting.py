"""Waiting for what must come true soon."""

import asyncio
from collections.abc import Callable

# Far below a session's lease (30 s) and a segment's life (600 s): what is gone by then did not just run out.
SECONDS = 15


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait until ``condition()`` is true; fail if that takes too long."""
    deadline = asyncio.get_running_loop().time() + SECONDS
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.02)
