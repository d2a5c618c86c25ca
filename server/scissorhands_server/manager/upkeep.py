"""What the manager does on its own: it looks for the store, ends leases and deletes what was left to be deleted."""

import asyncio
import logging
from contextlib import suppress

from scissorhands.errors import StoreUnavailableError
from scissorhands.ledger import Ledger
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.manager.segments import Segments
from scissorhands_server.store.base import PageStore

LOGGER = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.5


class Upkeep:
    """Runs every now and then until it is closed.

    Args:
        store: The store; asking it also closes its circuit again when it is back.
        ledger: The ledger.
        segments: Deletes segments.
        metrics: The manager's metrics.
    """

    def __init__(self, store: PageStore, ledger: Ledger, segments: Segments, metrics: ManagerMetrics) -> None:
        self._store = store
        self._ledger = ledger
        self._segments = segments
        self._metrics = metrics
        self._up: bool | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            self._ledger.sweep()
            await self._look_for_store()
            if self._up:
                await self._discard()
            self._metrics.show(self._ledger)
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _look_for_store(self) -> None:
        try:
            await self._store.ping()
        except StoreUnavailableError as error:
            if self._up is not False:
                LOGGER.warning("the store does not answer: %s", error)
            self._up = False
        else:
            if not self._up:
                LOGGER.info("the store answers")
            self._up = True
        self._metrics.store_up.set(self._up)

    async def _discard(self) -> None:
        for record in self._ledger.to_discard():
            try:
                await self._segments.discard(record)
            except StoreUnavailableError as error:
                LOGGER.info("segments of session %s are not deleted yet: %s", record.session_id, error)
                return
