"""Files that are whole or not there."""
import os
from typing import Callable


def replace_file(path: str, write: Callable[[str], None]) -> None:
    """Calls `write` with a path beside this one, then renames: killed at any moment, what
    stands at `path` is the old file or the new one."""
    beside = f"{path}.writing"
    try:
        write(beside)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.remove(beside)


def replace_text(path: str, text: str) -> None:
    """Writes a file of text: killed at any moment, the old one or the new one is there."""
    def write(beside: str) -> None:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
    replace_file(path, write)


def must_exist(*paths: str) -> None:
    """MXNet's own errors for a missing file name its C++ sources."""
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} does not exist")
