"""A real Redis server of a test's own, and proxies that stand between it and a client."""

import contextlib
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
import redis


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RedisServer:
    """redis-server on a free port, nothing saved. Skips the test where there is none."""

    def __init__(self, *options: str) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("no redis-server on the path")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = options
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(400):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.025)
        raise AssertionError("redis-server did not come up")

    def flush(self) -> None:
        with redis.Redis(port=self.port) as client:
            client.flushall()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)


class Proxy:
    """Accepts on a port of its own and lets `serve` deal with each connection."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._quietly, args=(client,), daemon=True).start()

    def _quietly(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            self._serve(client)

    def close(self) -> None:
        self._listener.close()


def slow_proxy(port: int, delay_s: Callable[[], float]) -> Proxy:
    """Passes everything on; each answer so much later."""

    def serve(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port)) as server:
            threading.Thread(target=forward, args=(client, server), daemon=True).start()
            while data := server.recv(65536):
                time.sleep(delay_s())
                client.sendall(data)

    def forward(client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)

    return Proxy(serve)


def garbage_server(answer: bytes) -> Proxy:
    """Answers whatever it is sent with the same bytes."""

    def serve(client: socket.socket) -> None:
        while client.recv(65536):
            client.sendall(answer)

    return Proxy(serve)
