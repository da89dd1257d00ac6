"""KVTiers: the moving parts beside a KV pool, closed together."""

from dataclasses import dataclass

from moestro.runner.page_loader import PageLoader
from moestro.runner.store_opening import StoreOpening
from moestro.runner.transfer import PageTransfer


@dataclass(frozen=True, slots=True)
class KVTiers:
    """loader: for loads within a step. transfer: for everything else; both share one HostPool.

    opening: of the store, where there is one.
    """

    loader: PageLoader
    transfer: PageTransfer
    opening: StoreOpening | None = None

    def close(self) -> bool:
        """Write what is pending, for at most transfer.FLUSH_S, and let go of the KV pool.

        False: a move is stuck and still uses the pool, whose memory must stay.
        """
        if self.opening is not None:
            self.opening.close()
        self.loader.close()
        self.transfer.close()
        return not self.transfer.uses_pools
