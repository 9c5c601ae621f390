"""What one tenant may use: requests that are open at once, and tokens a minute."""

import time
from collections.abc import Callable

from engine.errors import ErrorKind, RequestError
from server.keys import Tenant

MINUTE = 60.0


class Quota:
    """Requests and tokens of one tenant. Tokens are a bucket that fills at the tenant's rate, up to a minute's worth.
    They are counted when they are known, a prompt's at admission and an output's as it comes, so that one call may
    overdraw the bucket; then none is admitted until it is above zero again. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._num_open = 0
        self._used = 0.0  # tokens not yet forgotten
        self._updated = clock()

    def open(self, tenant: Tenant) -> None:
        """Begin a call. Raises RequestError OVERLOADED; `close` ends it."""
        most = tenant.max_requests
        if most is not None and self._num_open >= most:
            message = f"this key has {most} requests open and may have no more; try again when one has ended"
            raise RequestError(ErrorKind.OVERLOADED, message, code="key_requests")
        if tenant.tokens_per_minute is not None:
            self._forget(tenant.tokens_per_minute)
            over = self._used - tenant.tokens_per_minute
            if over >= 0:
                wait = min(MINUTE, 1 + over * MINUTE / tenant.tokens_per_minute)
                message = f"this key may use {tenant.tokens_per_minute} tokens a minute, and has; try again later"
                raise RequestError(ErrorKind.OVERLOADED, message, code="key_tokens", retry_after=wait)
        self._num_open += 1

    def spend(self, num_tokens: int) -> None:
        self._used += num_tokens

    def close(self) -> None:
        self._num_open -= 1

    def _forget(self, tokens_per_minute: int) -> None:
        now = self._clock()
        self._used = max(0.0, self._used - (now - self._updated) * tokens_per_minute / MINUTE)
        self._updated = now
