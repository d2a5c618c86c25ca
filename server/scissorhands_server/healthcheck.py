"""``python -m scissorhands_server.healthcheck HOST:PORT``: exits 0 if the server there reports that it serves.

Containers run it, since their images hold no other gRPC client.
"""

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def check(address: str, timeout: float) -> None:
    """Ask the server at ``address`` (``host:port``) for its health, for at most ``timeout`` seconds.

    Raises:
        click.ClickException: It does not answer, or answers that it does not serve.
    """
    # A proxy from the environment has no place between a container and itself.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service="")
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            raise click.ClickException(f"{address} does not answer: {error.code().name}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise click.ClickException(f"{address} answers {status}")


@click.command()
@click.argument("address")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=3.0, show_default=True, help="Longest wait, in s.")
def main(address: str, timeout: float) -> None:
    """Exit 0 if the server at ADDRESS (host:port) reports that it serves."""
    check(address, timeout)
    click.echo("SERVING")


if __name__ == "__main__":
    main()
