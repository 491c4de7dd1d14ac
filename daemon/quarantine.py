"""Which devices are not to be used any more, since workers died on them too often.

Pure: told of deaths, the clock passed in. A broken device otherwise takes a worker down again and
again, and each time the requests that were given to it.
"""

from collections import defaultdict, deque

WINDOW_S = 600.0


class Quarantine:
    """Counts deaths by device.

    Args:
        max_deaths: so many within `window_s` are too many; 0: there are never too many.
    """

    def __init__(self, max_deaths: int, window_s: float = WINDOW_S) -> None:
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)

    def died(self, device: str, reason: str, now_s: float) -> str | None:
        """A worker has died there; why the device is not to be used again, if so."""
        if self._max_deaths == 0:
            return None
        deaths = self._deaths[device]
        deaths.append(now_s)
        while deaths[0] <= now_s - self._window_s:
            deaths.popleft()
        if len(deaths) < self._max_deaths:
            return None
        return (
            f"device {device} is quarantined: workers died on it {len(deaths)} times within "
            f"{self._window_s / 60:g} minutes, last: {reason}"
        )

    def lift(self, device: str) -> None:
        """It is to be tried again."""
        self._deaths.pop(device, None)
