"""Reading a metrics endpoint."""

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

from scissorhands.errors import UnavailableError

TIMEOUT_SECONDS = 5.0
# Far more than any of our endpoints has.
MOST_BYTES = 16 << 20
# An endpoint is a neighbor; a proxy for the way out of the network does not know it.
_OPENER = build_opener(ProxyHandler({}))


@dataclass(frozen=True)
class Scrape:
    """The samples of an endpoint at one time.

    Args:
        at: When they were read, by a monotonic clock, in seconds.
        samples: Values by name and labels.
    """

    at: float
    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over the series of a name that have these labels, whatever others they have; 0 for none."""
        wanted = frozenset(labels.items())
        return sum(value for (found, held), value in self.samples.items() if found == name and wanted <= held)

    def label(self, name: str, label: str) -> str:
        """Return a label of any series of a name; empty if there is none."""
        return next((dict(held).get(label, "") for found, held in self.samples if found == name), "")


def scrape(endpoint: str) -> Scrape:
    """Read an endpoint.

    Args:
        endpoint: ``host:port``, or a URL.

    Raises:
        UnavailableError: It does not answer, or with something else than metrics.
    """
    url = endpoint if "://" in endpoint else f"http://{endpoint}/metrics"
    try:
        with _OPENER.open(url, timeout=TIMEOUT_SECONDS) as response:
            text = response.read(MOST_BYTES).decode()
        samples = {
            (sample.name, frozenset(sample.labels.items())): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise UnavailableError(f"{url} does not answer with metrics: {getattr(error, 'reason', error)}") from error
    return Scrape(time.monotonic(), samples)
