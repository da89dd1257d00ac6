"""A server in a process of its own, with the model that ships, on a free port."""

import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.cli.terminal import start

SMALL = ("--kv-cache-memory-bytes", "64MiB", "--num-threads", "1")


@dataclass
class LiveServer:
    """A running `moestro serve`. url is set once it listens; log grows while it runs."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    url: str = ""

    def wait_until_serving(self) -> None:
        """Read the log up to the line that tells the address, then go on reading behind."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"serving .* on (http://\S+)", line)
            if found:
                self.url = found[1]
                threading.Thread(target=self._read_on, daemon=True).start()
                return
        raise AssertionError("the server ended:\n" + "".join(self.log))

    def _read_on(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(120)


@contextmanager
def live_server(*flags: str) -> Iterator[LiveServer]:
    """`moestro serve --port 0 FLAGS`, killed at the end if it still runs."""
    server = LiveServer(start("serve", "--port", "0", *SMALL, *flags))
    try:
        server.wait_until_serving()
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        for pipe in (server.process.stdout, server.process.stderr):
            if pipe is not None:
                pipe.close()
