"""Whether ports are free or ours already, and whether named servers serve."""

import socket
from http.client import HTTPException
from urllib.request import ProxyHandler, build_opener

import click

from scissorhands.credentials import Credentials
from scissorhands_server.doctor.finding import Finding
from scissorhands_server.healthcheck import check as check_health

_TIMEOUT_SECONDS = 2.0
_OURS = b"scissorhands_"
_MAX_METRICS_BYTES = 1 << 20


def check_server(name: str, address: str, credentials: Credentials | None = None) -> Finding:
    """Ask a server that should be running for its health."""
    try:
        check_health(address, _TIMEOUT_SECONDS, credentials)
    except click.ClickException as lack:
        return Finding.failed(name, lack.message, f"start it with 'scissorhands {name}', or name its right address")
    return Finding.ok(name, f"{address} serves")


def check_grpc_port(name: str, host: str, port: int, credentials: Credentials | None = None) -> Finding:
    """Look whether the port of a server is free, or a server of ours has it."""
    if _is_free(host, port):
        return Finding.ok(name, f"{host}:{port} is free")
    try:
        check_health(f"{host}:{port}", _TIMEOUT_SECONDS, credentials)
    except click.ClickException:
        return _taken(name, host, port)
    return Finding.ok(name, f"{host}:{port} is in use by a server that serves")


def check_metrics_port(name: str, host: str, port: int) -> Finding:
    """Look whether the port of a metrics endpoint is free, or an endpoint of ours has it."""
    if _is_free(host, port):
        return Finding.ok(name, f"{host}:{port} is free")
    # Without the proxies of the environment, which have no place between a machine and itself.
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(f"http://{host}:{port}/metrics", timeout=_TIMEOUT_SECONDS) as response:
            ours = _OURS in response.read(_MAX_METRICS_BYTES)
    except (OSError, HTTPException):
        ours = False
    return Finding.ok(name, f"{host}:{port} is in use by our metrics") if ours else _taken(name, host, port)


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def _taken(name: str, host: str, port: int) -> Finding:
    return Finding.failed(name, f"{host}:{port} is taken by another program", "stop it, or serve on another port")
