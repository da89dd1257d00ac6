"""StoreOpening: a store opened while the engine runs, because its digest or itself takes time."""

import logging
import threading
import weakref
from collections.abc import Callable

from moestro.core.background import lower_priority
from moestro.core.page_store import PageStore, StoreError
from moestro.errors import ConfigError
from moestro.runner.transfer import PageTransfer

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""After which a store that could not be used is tried again."""

Digest = Callable[[Callable[[], bool]], bytes | None]
"""Computes the namespace digest; asks its argument now and then whether to stop, and then gives
None. Raises OSError or ValueError when there is none to be had."""


class StoreOpening:
    """A thread that computes the digest, opens the store, and hands it to the transfer.

    Until then, and while the store can't be used, the engine runs without it.
    """

    def __init__(
        self, transfer: PageTransfer, digest: Digest, open_store: Callable[[bytes], PageStore]
    ) -> None:
        self._transfer = weakref.ref(transfer)
        self._digest = digest
        self._open_store = open_store
        self._stopped = threading.Event()
        self._tried = threading.Event()
        self._error: ConfigError | None = None
        weakref.finalize(transfer, self._stopped.set)
        self._thread = threading.Thread(target=self._run, name="moestro-kv-open", daemon=True)

    def start(self, wait_s: float) -> None:
        """Begin, and wait so long for a first outcome. Raises the ConfigError it may be."""
        self._thread.start()
        self._tried.wait(wait_s)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop trying; what is opened too late is closed at once. Idempotent."""
        self._stopped.set()

    def _run(self) -> None:
        lower_priority()
        try:
            digest = self._digest(self._stopped.is_set)
            while digest is not None and not self._stopped.is_set() and not self._open(digest):
                self._tried.set()
                self._stopped.wait(RETRY_S)
        except ConfigError as error:
            logger.error("the KV store stays off: %s", error)
            self._error = error
        except (OSError, ValueError) as error:
            logger.warning("the KV store stays off: %s", error)
        except Exception:
            logger.exception("the KV store stays off")
        finally:
            self._tried.set()

    def _open(self, digest: bytes) -> bool:
        """Whether there is nothing more to do."""
        try:
            store = self._open_store(digest)
        except StoreError as error:
            logger.warning(
                "the KV store can't be used (%s): %s; trying again in %.0f s",
                error.failure,
                error,
                RETRY_S,
            )
            transfer = self._transfer()
            if transfer is not None:
                transfer.note_unusable(error.failure)
            return transfer is None
        transfer = self._transfer()
        if transfer is None or self._stopped.is_set():
            store.close(0.0)
        else:
            transfer.attach(store)
            logger.info("the KV store is in use")
        return True
