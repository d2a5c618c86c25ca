"""``python -m scissorhands_server.healthcheck HOST:PORT``: exits 0 if the server there reports that it serves.

Containers run it, since their images hold no other gRPC client.
"""

from contextlib import closing

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scissorhands.credentials import Credentials, connection_hint
from scissorhands.credentials_options import credentials_options
from scissorhands.errors import InvalidRequestError


def check(address: str, timeout: float, credentials: Credentials | None = None) -> None:
    """Ask a server for its health.

    Args:
        address: Its address, ``host:port``.
        timeout: The most that this may take, in seconds.
        credentials: How it is reached; None does without TLS.

    Raises:
        click.ClickException: It does not answer, or answers that it does not serve, or a file cannot be used.
    """
    try:
        # A proxy from the environment has no place between a container and itself.
        opened = (credentials or Credentials()).channel(address, [("grpc.enable_http_proxy", 0)])
    except InvalidRequestError as error:
        raise click.ClickException(str(error)) from error
    with closing(opened) as channel:
        request = health_pb2.HealthCheckRequest(service="")
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            hint = connection_hint(error.details() or "", "--")
            why = f"{error.code().name}; {hint}" if hint else error.code().name
            raise click.ClickException(f"{address} does not answer: {why}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise click.ClickException(f"{address} answers {status}")


@click.command()
@click.argument("address")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=3.0, show_default=True, help="Longest wait, in s.")
@credentials_options
def main(address: str, timeout: float, credentials: Credentials) -> None:
    """Exit 0 if the server at ADDRESS (host:port) reports that it serves."""
    check(address, timeout, credentials)
    click.echo("SERVING")


if __name__ == "__main__":
    main()
