"""One Redis server and one Mooncake master for all tests that don't harm them."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kvstore.redis_server import RedisServer, free_port


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def mooncake_cluster() -> Iterator[tuple[str, Any]]:
    """The address of a master, and a client that lends the memory in which the pages lie."""
    mooncake = pytest.importorskip("mooncake.store", exc_type=ImportError)
    port = free_port()
    master = subprocess.Popen(
        [Path(sys.executable).with_name("mooncake_master"), "--rpc_port", str(port),
         "--metrics_port", str(free_port())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(400):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.025)
    address, lender = f"127.0.0.1:{port}", mooncake.MooncakeDistributedStore()
    assert not lender.setup("127.0.0.1", "P2PHANDSHAKE", 2**26, 2**24, "tcp", "", address)
    yield address, lender
    lender.close()
    master.kill()
    master.wait()


@pytest.fixture
def mooncake_url(mooncake_cluster: tuple[str, Any]) -> str:
    """A store without pages."""
    address, lender = mooncake_cluster
    lender.remove_all(True)
    return f"mooncake://{address}"
