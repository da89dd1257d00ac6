"""The Channel of one process: two queues between two threads."""

import queue

from moestro.core.messages import Channel

_END = object()


class ThreadChannel:
    """One end of a pair; either end may close it for both. See core.messages.Channel."""

    def __init__(
        self, inbox: "queue.SimpleQueue[object]", outbox: "queue.SimpleQueue[object]"
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._peer: ThreadChannel | None = None
        self._closed = False

    def send(self, message: object) -> None:
        """Queue a message. Raises BrokenPipeError once either end has closed."""
        if self._closed:
            raise BrokenPipeError("the channel is closed")
        self._outbox.put(message)

    def receive(self, timeout_s: float | None = None) -> object | None:
        """The next message, None on timeout; EOFError after the last one of a closed channel."""
        try:
            message = self._inbox.get(timeout_s != 0, timeout_s)
        except queue.Empty:
            return None
        if message is _END:
            self._inbox.put(_END)  # for whoever asks again
            raise EOFError("the channel is closed")
        return message

    def close(self) -> None:
        """Wake both ends; what was sent before can still be received. Repeatable."""
        if self._closed:
            return
        for end in (self, self._peer):
            if end is not None:
                end._closed = True
                end._inbox.put(_END)


def channel_pair() -> tuple[Channel, Channel]:
    """Two connected ends."""
    here: queue.SimpleQueue[object] = queue.SimpleQueue()
    there: queue.SimpleQueue[object] = queue.SimpleQueue()
    one, other = ThreadChannel(here, there), ThreadChannel(there, here)
    one._peer, other._peer = other, one
    return one, other
