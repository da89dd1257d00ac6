"""Taking an address, and what is said when it can't be had."""

import socket

import pytest

from moestro.errors import ConfigError
from moestro.server.listen import listen, url_of


def test_a_free_port_is_told() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert port > 0
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_a_port_in_use() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is in use.*--port"):
            listen("127.0.0.1", port)


def test_a_port_is_free_again_after_its_connections() -> None:
    """A restart must not wait for connections that linger in TIME_WAIT."""
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        sock.setblocking(True)
        accepted, _ = sock.accept()
        accepted.close()
        client.close()
    with listen("127.0.0.1", port):
        pass


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("host.invalid", "--host"),
        ("203.0.113.7", "does not have that address"),
        ("a" * 70, "--host"),
    ],
)
def test_addresses_that_are_not_here(host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        listen(host, 0)


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with listen("::1", 0) as sock:
            assert url_of(sock).startswith("http://[::1]:")
    except ConfigError as error:
        pytest.skip(str(error))
