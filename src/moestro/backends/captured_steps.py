"""CapturedSteps: steps captured once each and replayed; those used last are kept."""

import logging
from collections.abc import Callable, Hashable
from typing import Any

from moestro.backends.base import CapturedStep, GraphPool
from moestro.errors import UnsupportedError

logger = logging.getLogger(__name__)

MAX_STEPS = 256
"""The one used longest ago makes way; a step keeps about 1 KB a layer and kernel call."""


class CapturedSteps:
    """Runs steps by key: a replay where the key has been captured, else captured as it runs.

    pool None: every step runs eagerly. One that can't be captured (torch would compute a part of
    it, and a replay would come out wrong) turns capturing off, with a warning that begins with
    `told`.
    """

    def __init__(self, pool: GraphPool | None, told: str) -> None:
        self._pool = pool
        self._told = told
        self._steps: dict[Hashable, CapturedStep] = {}  # used longest ago first

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_on(self) -> bool:
        """Whether steps are captured."""
        return self._pool is not None

    def run(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What `compute` returns; of a captured step, valid until the pool's next one."""
        if self._pool is None:
            return compute()
        step = self._steps.pop(key, None)
        if step is not None and step.is_current():
            self._steps[key] = step
            step.replay()
            return step.result
        if step is not None:
            step.close()
        elif len(self._steps) == MAX_STEPS:
            self._steps.pop(next(iter(self._steps))).close()
        try:
            step = self._pool.capture(compute)
        except UnsupportedError as error:
            self.close()
            logger.warning("%s from now on: %s", self._told, error)
            return compute()
        self._steps[key] = step
        return step.result

    def clear(self) -> None:
        """Forget every step; they are captured anew when they come."""
        for step in self._steps.values():
            step.close()
        self._steps.clear()

    def close(self) -> None:
        """Forget every step and capture no more. Idempotent."""
        self._pool = None
        self.clear()
