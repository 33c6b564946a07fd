"""Tasks that may be given up: waiting for one no longer than it can matter, and letting go of it."""

import asyncio
from typing import Any


async def done_or_set(work: "asyncio.Future[Any]", event: asyncio.Event) -> None:
    """Wait until the work is done or the event is set; either may be true already. The work goes on."""
    watching = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()


def abandon(work: "asyncio.Future[Any]") -> None:
    """Cancel it and wait for nothing. Whatever it may still raise has come too late to matter."""
    work.cancel()
    work.add_done_callback(_retrieve)


def _retrieve(work: "asyncio.Future[Any]") -> None:
    # So that asyncio does not report the error as lost.
    if not work.cancelled():
        work.exception()
