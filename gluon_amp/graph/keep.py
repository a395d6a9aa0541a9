"""Names that `keep=` names: regular expressions for whole names."""
import re
from typing import Iterable, Set

from ..checks import nearest


def matching(pattern: str, names: Iterable[str]) -> Set[str]:
    """The names that the pattern matches as a whole."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"keep: {pattern!r} is no regular expression: {error}") from None
    return {name for name in names if compiled.fullmatch(name)}


def matches_nothing(what: str, word: str, names: Iterable[str], where: str = "network") -> str:
    """An error's text, with the names that come near."""
    near = ", ".join(nearest(word, sorted(names)))
    return f"keep: {what} matches nothing in this {where}. Near it: {near}"
