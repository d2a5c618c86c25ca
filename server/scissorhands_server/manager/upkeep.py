"""What the manager does on its own: it looks for the store, ends leases, deletes what was left, and lets mend it."""

import asyncio
import logging

from scissorhands.errors import StoreUnavailableError
from scissorhands.ledger import Ledger
from scissorhands_server.manager.janitor import Janitor
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
        janitor: Mends what lies in the store.
        janitor_interval: Time between two rounds of the janitor, in seconds.
        metrics: The manager's metrics.
    """

    def __init__(
        self,
        store: PageStore,
        ledger: Ledger,
        segments: Segments,
        janitor: Janitor,
        janitor_interval: float,
        metrics: ManagerMetrics,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._segments = segments
        self._janitor = janitor
        self._janitor_interval = janitor_interval
        self._metrics = metrics
        self._up: bool | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._mend())]

    async def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._ledger.sweep()
            await self._look_for_store()
            if self._up:
                await self._discard()
                await self._reconcile()
            self._metrics.show(self._ledger)
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _mend(self) -> None:
        while True:
            try:
                await self._janitor.tick()
            except StoreUnavailableError as error:
                LOGGER.info("the janitor leaves the store alone: %s", error)
            await asyncio.sleep(self._janitor_interval)

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

    async def _reconcile(self) -> None:
        """Look what is stored of sessions whose lease ran out: another manager may have closed them, and deleted it."""
        for record in self._ledger.take_expired():
            try:
                await self._segments.reconcile(record)
            except StoreUnavailableError as error:
                LOGGER.info("segments of session %s are told from memory: %s", record.session_id, error)
                return
