"""Checks of values, and lists of names in error messages."""
import argparse
import contextlib
import difflib
import numbers
import operator
import re
from typing import Any, Iterable, Iterator, List, NoReturn, Sequence


def pip_install(extra: str) -> str:
    """Returns the command that installs an extra, with or without a release of gluon_amp."""
    return f"pip install '.[{extra}]' in a checkout of gluon_amp"


@contextlib.contextmanager
def imports_of(extra: str, what: str) -> Iterator[None]:
    """Replaces an import error of its block by one that names an extra of gluon_amp.

    Args:
        what: what needs the extra's packages, such as "a report".
    """
    try:
        yield
    except (ImportError, TypeError) as error:  # TypeError: TensorBoard's, with a newer protobuf
        reason = str(error).partition("\n")[0]
        raise ImportError(f"{what} needs packages that cannot be imported: {pip_install(extra)} "
                          f"({reason})") from error


def positive_number(value: Any, what: str) -> float:
    """Returns a number that is a normal number of float32, and its inverse, too. Raises ValueError
    for others."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 2.0 ** -126 <= value <= 2.0 ** 126:
        raise ValueError(f"{what} must be a positive, finite number, from 2^-126 to 2^126. "
                         f"Received: {value!r}")
    return float(value)


def whole_number(value: object, what: str, least: int) -> int:
    """Returns an integer of at least `least`, or raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{what} must be an integer >= {least}. Received: {value!r}")
    return int(value)


def iterator(iterable: Iterable[Any], what: str) -> Iterator[Any]:
    """Returns an iterator, or raises TypeError."""
    try:
        return iter(iterable)
    except TypeError:
        raise TypeError(f"{what}. Received: {type(iterable).__name__}") from None


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences have the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def positive(text: str) -> int:
    """The type of a command's positive integer arguments."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1. Received: {text!r}")
    return int(text)


def counted(number: int, what: str) -> str:
    """Returns a text such as "1 epoch" or "2 epochs"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Returns a text such as "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def in_names(names: Iterable[str], most: int = 5) -> str:
    """Returns a text such as " in a, b and 3 more", or "" without names."""
    names = list(names)
    return f" in {listed(names, most)}" if names else ""


def message(error: Exception) -> str:
    """Returns the message of an MXNet exception without source location, failed condition and full
    stop."""
    lines = [line for line in str(error).splitlines()
             if line.strip() and not line.startswith(("Traceback", "  File"))]
    said = lines[0] if lines else type(error).__name__
    said = re.sub(r"^MXNetError: |\[[\d:]+\] \S+: |Check failed: .*?: (?=\w)", "", said)
    return said.rstrip(" .")  # callers append to it


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Returns a text such as ". Did you mean a or b?", or "" if no name is similar.

    If no whole name is, last parts are compared, such as dense0_fwd of net0_dense0_fwd.
    """
    whole = {other: other for other in names}
    parts = {other[match.end():]: other for other in names
             for match in re.finditer("[._]", other)}
    for candidates in (whole, parts):
        similar = [part for part in candidates if name and part.startswith(name)] \
            or difflib.get_close_matches(name, list(candidates), n=3)
        if similar:
            close = dict.fromkeys(candidates[part] for part in similar[:3])
            return f". Did you mean {' or '.join(close)}?"
    return ""


def order_of(names: Sequence[str]) -> List[int]:
    """Returns the indices that sort names in natural order: dense9 before dense10."""
    def parts(i: int) -> List[Any]:
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", names[i])]
    return sorted(range(len(names)), key=parts)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line. It does not accept abbreviated flags."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Exits with argparse's message, without the usage."""
        self.exit(2, f"{self.prog}: error: {message} (--help shows more)\n")


def aligned(rows: Iterable[Sequence[str]]) -> List[str]:
    """Returns lines of columns with two spaces between them."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in rows]
