"""The containers' health check, against a real gRPC server."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from scissorhands_server.healthcheck import main


@pytest.fixture
def servicer():
    return health.HealthServicer()


@pytest.fixture
def address(servicer):
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(timeout=5)


def test_serving_is_healthy(servicer, address):
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    result = CliRunner().invoke(main, [address])
    assert result.exit_code == 0
    assert result.output == "SERVING\n"


def test_not_serving_is_unhealthy(servicer, address):
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    result = CliRunner().invoke(main, [address])
    assert result.exit_code == 1
    assert "NOT_SERVING" in result.output


def test_nobody_there_is_unhealthy():
    result = CliRunner().invoke(main, ["127.0.0.1:1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1 does not answer: UNAVAILABLE" in result.output
