"""The channel to the managers: calls take turns over all addresses of their name, and leave out those that are gone.

All of it is gRPC's own: the balancer, the ejection of addresses that fail (gRFC A50), retries (gRFC A6), and looking
the name up again. See https://grpc.io/docs/guides/service-config/.
"""

import json

import grpc

from scissorhands.credentials import Credentials
from scissorhands.v1 import cache_manager_pb2

_SERVICE = cache_manager_pb2.DESCRIPTOR.services_by_name["CacheManagerService"]
# What may be asked twice, so that a manager that goes in the middle of a call costs no more than a call to the next. A
# plan follows from its snapshot; what the others do is done once, however often it is asked for.
_REPEATED = ("OpenSession", "RenewSessions", "PlanEvictions", "CloseSession")
# What of a stream is kept to be sent again; a call that has sent more is not repeated.
_REPEATED_BYTES = 8 << 20

_SERVICE_CONFIG = {
    "loadBalancingConfig": [
        {
            # A manager that keeps its connections and answers nothing is left out, too; never all of them.
            "outlier_detection_experimental": {
                "interval": "1s",
                "baseEjectionTime": "30s",
                "maxEjectionTime": "120s",
                "maxEjectionPercent": 50,
                "failurePercentageEjection": {"threshold": 95, "minimumHosts": 2, "requestVolume": 2},
                "childPolicy": [{"round_robin": {}}],
            }
        }
    ],
    "methodConfig": [
        {
            "name": [
                *({"service": _SERVICE.full_name, "method": _SERVICE.methods_by_name[name].name} for name in _REPEATED),
                {"service": "grpc.health.v1.Health", "method": "Check"},
            ],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.01s",
                "maxBackoff": "0.1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}

_OPTIONS = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.per_rpc_retry_buffer_size", _REPEATED_BYTES),
    # The manager is a neighbor; a proxy for the way out of the network does not know it.
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A manager that comes back is found within a second, however long it was away, at another address too.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


def balanced_channel(target: str, credentials: Credentials | None = None) -> grpc.aio.Channel:
    """Return a channel to all managers of a name.

    Args:
        target: ``host:port``, whose host may have several addresses, or several addresses as gRPC writes them:
            ``ipv4:10.0.0.1:50052,10.0.0.2:50052``.
        credentials: How they are reached; None does without TLS.

    Raises:
        InvalidRequestError: A file of the credentials cannot be used.
    """
    return (credentials or Credentials()).aio_channel(target, _OPTIONS)
