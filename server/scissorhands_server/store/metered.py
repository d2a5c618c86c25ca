"""Metrics of the calls to the store."""

import time
from collections.abc import Awaitable, Callable

from prometheus_client import Counter, Histogram

from scissorhands.errors import StoreUnavailableError
from scissorhands_server.store.base import PageStore
from scissorhands_server.store.decorator import Result, StoreDecorator


class MeteredStore(StoreDecorator):
    """Times every call, and counts those that fail by reason.

    Args:
        inner: The store.
        seconds: Histogram with the label ``method``.
        errors: Counter with the label ``reason``.
    """

    def __init__(self, inner: PageStore, seconds: Histogram, errors: Counter) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._errors = errors

    async def guard(self, method: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """Make the call and measure it."""
        began = time.perf_counter()
        try:
            return await call()
        except StoreUnavailableError as error:
            self._errors.labels(error.reason).inc()
            raise
        finally:
            self._seconds.labels(method).observe(time.perf_counter() - began)
