"""The only clock: the running event loop's.

Every duration in the controller is measured with :func:`now` and waited for with ``asyncio.sleep`` or
``asyncio.timeout``, which read the same clock. A test that runs on
:class:`staleflow.testing.VirtualClock` therefore never sleeps, and its event log depends on its seed alone.
"""

import asyncio


def now() -> float:
    """Seconds on the event loop's monotonic clock."""
    return asyncio.get_running_loop().time()
