"""Taking the address before anything slow happens."""

import errno
import socket

from moestro.errors import ConfigError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 takes a free one.

    It listens at once, so that no second server can take the address while the model loads;
    clients that come early wait. Raises ConfigError that names the address and what to change.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"Can't listen on {host}:{port}: {_reason(error)}. Give an address of this machine "
            "with --host."
        ) from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(_refusal(host, port, error)) from None
    return sock


def url_of(sock: socket.socket) -> str:
    """http://host:port of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refusal(host: str, port: int, error: OSError) -> str:
    where = f"Can't listen on {host}:{port}: "
    if error.errno == errno.EADDRINUSE:
        return f"{where}the port is in use. Choose another with --port (0 takes a free one)."
    if error.errno == errno.EACCES:
        return f"{where}permission denied. Choose a port above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{where}this machine does not have that address. Choose another with --host."
    return f"{where}{error.strerror}."


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
