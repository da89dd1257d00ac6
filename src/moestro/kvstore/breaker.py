"""When to leave a failing store alone, and when to try it again. A policy: no thread, no lock."""

from collections.abc import Callable

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"
SEVERITY = (CLOSED, HALF_OPEN, OPEN)


class CircuitBreaker:
    """closed -> open after `threshold` failures in a row -> half_open after a cool-down.

    half_open lets one call through, the probe: its success closes, its failure opens again for
    twice the time, up to `max_cool_down_s`. A probe that never reports back stops counting after
    the cool-down that preceded it, so that no lost call can keep the breaker half open for ever.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        threshold: int = 3,
        cool_down_s: float = 1.0,
        max_cool_down_s: float = 30.0,
    ) -> None:
        self._clock = clock
        self._threshold = threshold
        self._first_cool_down_s = cool_down_s
        self._max_cool_down_s = max_cool_down_s
        self._cool_down_s = cool_down_s
        self._num_failures = 0
        self._is_open = False
        self._try_at = 0.0

    @property
    def state(self) -> str:
        """closed, open, or half_open once a probe may go or is on its way."""
        if not self._is_open:
            return CLOSED
        return HALF_OPEN if self._clock() >= self._try_at or self._probing else OPEN

    @property
    def retry_after_s(self) -> float:
        """Until a call can be allowed; 0 when one is."""
        return max(0.0, self._try_at - self._clock()) if self._is_open else 0.0

    _probing = False

    def allow(self) -> bool:
        """Whether a call may go to the store now; in half_open, the caller is the probe."""
        if not self._is_open:
            return True
        now = self._clock()
        if now < self._try_at:
            return False
        self._probing = True
        self._try_at = now + self._cool_down_s
        return True

    def succeeded(self) -> None:
        """A call was answered, whatever the answer."""
        self._num_failures = 0
        self._is_open = self._probing = False
        self._cool_down_s = self._first_cool_down_s

    def failed(self) -> None:
        """A call was not answered, or with an error of the store's."""
        self._num_failures += 1
        if self._is_open:
            if not self._probing:
                return  # sent before it opened
            self._cool_down_s = min(2 * self._cool_down_s, self._max_cool_down_s)
        elif self._num_failures < self._threshold:
            return
        self._is_open, self._probing = True, False
        self._try_at = self._clock() + self._cool_down_s

    def gave_up(self) -> None:
        """An allowed call was never sent: it says nothing of the store; the next may probe."""
        if self._is_open and self._probing:
            self._probing = False
            self._try_at = self._clock()
