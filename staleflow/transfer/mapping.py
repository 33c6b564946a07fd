"""Memory that is a file, and memory that is nobody's."""

import mmap
import os
from pathlib import Path


def published_file(path: Path) -> memoryview:
    """The contents of a file that does not change, to read; its pages come when they are first looked at.

    The system could be asked for all of them at once, but no other thread of Python runs while it makes the mapping.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def new_file(path: Path, size_bytes: int) -> memoryview:
    """A new file to write. Its space is taken first: where there is none, that is an error and not a signal later."""
    with path.open("xb+") as file:
        if size_bytes == 0:
            return memoryview(b"")
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        return memoryview(mmap.mmap(file.fileno(), size_bytes))


def anonymous(size_bytes: int) -> memoryview:
    """Memory of this process, to read and write."""
    if size_bytes == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
