"""Atomic creation and replacement of files and folders."""
import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
from typing import Callable, Iterator, Union


@contextlib.contextmanager
def errors_of_damage(path: str) -> Iterator[None]:
    """Replaces errors of its block, which reads a file with numbers of wrong types or sizes, by a
    ValueError that names the file."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def replace_file(path: str, write: Callable[[str], None]) -> None:
    """Replaces a file atomically: calls `write` with a temporary path, then renames.

    A symbolic link stays one: its target is replaced. An existing file keeps its permissions and
    its owner, if the system allows it. A device or a pipe is written to.

    Raises:
        OSError: the path is a folder, or in none.
    """
    target = os.path.realpath(path)
    if not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    before = os.stat(target) if os.path.exists(target) else None
    if before is not None and not stat.S_ISREG(before.st_mode):
        write(target)
        return
    beside = _unused(target)
    # `write` opens the file for writing, so its owner may write until the end.
    mode = 0o666 if before is None else before.st_mode & 0o777 | stat.S_IWUSR
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        write(beside)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        if before is not None:
            with contextlib.suppress(OSError):  # only root may give a file to another user
                os.chown(beside, before.st_uid, before.st_gid)
            os.chmod(beside, stat.S_IMODE(before.st_mode))
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)
        raise


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
    """Creates a folder atomically: yields a temporary folder, and renames it at the end.

    Raises:
        FileExistsError: `path` exists by then. It does not change.
    """
    beside = _unused(path.rstrip(os.sep))
    os.makedirs(beside)
    try:
        yield beside
        try:
            os.rename(beside, path)
        except OSError:
            if not os.path.lexists(path):
                raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _unused(path: str) -> str:
    """Returns the path of a temporary file or folder beside another."""
    return f"{path}.{secrets.token_hex(4)}.writing"


def replace_text(path: str, text: str) -> None:
    """Replaces a text file atomically."""
    replace_bytes(path, text.encode())


def replace_bytes(path: str, content: bytes) -> None:
    """Replaces a file atomically by this content."""
    def write(beside: str) -> None:
        with open(beside, "wb") as file:
            file.write(content)
    replace_file(path, write)


def sha256(path: Union[str, "os.PathLike[str]"]) -> str:
    """Returns the SHA-256 of a file."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            total.update(block)
    return total.hexdigest()


def must_exist(*paths: str) -> None:
    """Raises FileNotFoundError for a missing file; MXNet's error would cite its C++ sources."""
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} does not exist")
