"""Atomic replacement of files."""
import contextlib
import errno
import fcntl
import os
from typing import Callable, Iterator


def replace_file(path: str, write: Callable[[str], None]) -> None:
    """Replaces a file atomically: calls `write` with a temporary path, then renames.

    Processes that write the same file, such as ranks that all save, do so in turn.
    """
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    beside = f"{path}.writing"
    with _one_at_a_time(beside):
        try:
            write(beside)
            with open(beside, "rb") as file:
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(beside)
            raise


@contextlib.contextmanager
def _one_at_a_time(path: str) -> Iterator[None]:
    """Creates a file and holds its lock. If the previous owner of the lock has renamed or removed
    the file, creates it again."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                break
        os.close(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # forked processes would hold the lock otherwise
        os.close(file)


def replace_text(path: str, text: str) -> None:
    """Replaces a text file atomically."""
    def write(beside: str) -> None:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
    replace_file(path, write)


def must_exist(*paths: str) -> None:
    """Raises FileNotFoundError for a missing file; MXNet's error would cite its C++ sources."""
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} does not exist")
