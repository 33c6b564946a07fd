"""The time in which no engine serves: nobody's fault but the engines'."""

import asyncio

from staleflow import clock


class Outage:
    """Whether no engine serves, and for how long that has been so; one lasts until the first engine has started."""

    def __init__(self) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        """Set while no engine serves; set while one does."""
        self.began.set()
        self._since_s: float | None = None
        self._before_s = 0.0

    @property
    def lasts(self) -> bool:
        """Whether no engine serves."""
        return self.began.is_set()

    def total_s(self) -> float:
        """Seconds in which no engine has served since one did for the first time."""
        return self._before_s + (0.0 if self._since_s is None else clock.now() - self._since_s)

    def update(self, *, serves: bool) -> None:
        """Note whether an engine serves."""
        if serves and self.lasts:
            self._before_s, self._since_s = self.total_s(), None
            self.began.clear()
            self.ended.set()
        elif not serves and not self.lasts:
            self._since_s = clock.now()
            self.began.set()
            self.ended.clear()
