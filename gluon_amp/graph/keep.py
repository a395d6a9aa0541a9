"""Matches the regular expressions of `keep=` against whole names."""
import re
from typing import Any, Iterable, List, Set

from ..checks import nearest
from .graph import Graph


def operator_names(graph: Graph) -> Set[str]:
    """Returns the names of a graph's operators, those in loops included."""
    return {node.name for node in graph.nodes_within() if not node.is_variable}


def matching(pattern: str, *groups: Set[str]) -> List[Set[str]]:
    """Returns the names in each group that the pattern matches as a whole."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"keep: {pattern!r} is not a regular expression: {error}") from None
    return [{name for name in names if compiled.fullmatch(name)} for names in groups]


def kept_operators(graph: Graph, keep: Iterable[Any]) -> Set[str]:
    """Returns the names of a graph's operators that the expressions match.

    Raises:
        TypeError: an entry is not a string.
        ValueError: an entry matches nothing or is not a regular expression.
    """
    names = operator_names(graph)
    kept: Set[str] = set()
    for pattern in keep:
        if not isinstance(pattern, str):
            raise TypeError(f"keep takes regular expressions for names. Received: {pattern!r}")
        (found,) = matching(pattern, names)
        if not found:
            raise ValueError(matches_nothing(repr(pattern), pattern, names, "symbol"))
        kept |= found
    return kept


def matches_nothing(what: str, word: str, names: Iterable[str], where: str = "network") -> str:
    """Returns an error message that lists similar names."""
    near = ", ".join(nearest(word, sorted(filter(None, names))))
    return f"keep: {what} matches nothing in this {where}. Near it: {near}"
