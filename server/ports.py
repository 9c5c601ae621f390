"""Addresses that the server takes before it loads a model, so that a port that is taken is told at once."""

import socket

import grpc

from engine.errors import StartupError
from server.config import ServerConfig
from server.grpc import GrpcServer


def bind_http(config: ServerConfig) -> socket.socket:
    """A socket that has its port and does not listen: until the engine is there, connections are refused.

    Raises StartupError naming the port and why it is not free.
    """
    return _bind(config.host, config.http_port, "--http-port")


def bind_grpc(server: GrpcServer, config: ServerConfig, credentials: grpc.ServerCredentials | None = None) -> int:
    """Bind gRPC and return the port. Raises StartupError as `bind_http` does."""
    if config.grpc_port:
        # gRPC does not say why a bind failed, so ask the system first.
        _bind(config.host, config.grpc_port, "--grpc-port").close()
    try:
        return server.bind(address(config.host, config.grpc_port), credentials)
    except RuntimeError as error:
        raise _port_error(config.host, config.grpc_port, "--grpc-port", str(error)) from None


def bind_admin(config: ServerConfig) -> socket.socket | None:
    """As `bind_http`, on the loopback only; None where no such port is asked for."""
    return None if config.admin_port is None else _bind("127.0.0.1", config.admin_port, "--admin-port")


def _bind(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol's number: without it asyncio leaves TCP_NODELAY off, and every answer takes 40 ms longer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _port_error(host, port, flag, error.strerror or str(error)) from None
    return bound


def _port_error(host: str, port: int, flag: str, why: str) -> StartupError:
    return StartupError(
        f"cannot listen on port {port} of {host}: {why}; choose another {flag} (0: a free one) or --host"
    )


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
