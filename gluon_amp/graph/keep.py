"""Matches the entries of `keep=`: regular expressions against whole names, and operators."""
from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Set, Tuple

from .._mxnet import mx
from ..checks import did_you_mean, iterator, listed
from .graph import Graph


@dataclass(frozen=True)
class Operators:
    """What `ops` returns, for `keep=`.

    Attributes:
        as_written: the operators as the user named them.
        names: the names by which MXNet registers them.
        must_match: whether a network without them is an error.
    """
    as_written: Tuple[str, ...]
    names: FrozenSet[str]
    must_match: bool = True

    def __repr__(self) -> str:
        return f"amp.ops({', '.join(map(repr, self.as_written))})"

    def among(self, operators: Mapping[str, str]) -> Set[str]:
        """Returns the names of the nodes of these operators; `operators` has those of all nodes."""
        return {name for name, op in operators.items() if op in self.names}


class Kept(NamedTuple):
    """What stays float32 besides whole blocks: nodes by name, and all nodes of operators."""
    nodes: FrozenSet[str] = frozenset()
    operators: FrozenSet[str] = frozenset()

    @classmethod
    def union(cls, parts: Iterable[Kept]) -> Kept:
        nodes, operators = zip(*parts)
        return cls(frozenset().union(*nodes), frozenset().union(*operators))

    def in_graph(self, graph: Graph) -> Set[str]:
        """Returns the names of the graph's nodes that stay float32."""
        return {name for name, op in operators_in(graph).items()
                if name in self.nodes or op in self.operators}


def ops(*names: str) -> Operators:
    """Returns an entry for `keep=`: all nodes of these operators stay float32.

    Args:
        names: operators, as `mx.nd`, `mx.np` or `mx.npx` name them, such as "batch_dot" or
            "np.matmul". Without its module, a name is that of each module: "sum" is `mx.nd.sum` and
            `mx.np.sum`. Names under which MXNet registers operators are valid, too, such as
            "_plus_scalar", which adds a number.

    Raises:
        TypeError: a name is not a string.
        ValueError: no operator has this name, or there are no names.
    """
    if not names:
        raise ValueError('ops needs at least one operator, such as amp.ops("batch_dot")')
    registered: Set[str] = set()
    for name in names:
        if not isinstance(name, str):
            raise TypeError("ops takes names of operators, such as 'batch_dot'. "
                            f"Received: {name!r}")
        of_name = _registered().get(name)
        if not of_name:
            raise ValueError(f"MXNet has no operator {name!r}"
                             f"{did_you_mean(name, sorted(_registered()))}")
        registered |= of_name
    return Operators(names, frozenset(registered))


# Prefixes of registered names, and the modules with the operators' functions.
_MODULES = {"_np_": ("np",), "_npi_": ("np", "npx"), "_npx_": ("npx",), "_contrib_": ("contrib",),
            "_linalg_": ("linalg",), "_random_": ("random",), "_image_": ("image",),
            "_sparse_": ("sparse",)}


def _registered_name(alias: str) -> str:
    """Returns the name that an operator has in graphs."""
    handle, name = ctypes.c_void_p(), ctypes.c_char_p()
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(alias.encode(), ctypes.byref(handle)))
    mx.base.check_call(mx.base._LIB.MXSymbolGetAtomicSymbolName(handle, ctypes.byref(name)))
    return (name.value or b"").decode()


@lru_cache(maxsize=None)
def _registered() -> Dict[str, Set[str]]:
    """Returns the registered operators by each name that `ops` takes."""
    by_name: Dict[str, Set[str]] = {}
    for alias in mx.operator.get_all_registered_operators():
        op = {_registered_name(alias)}
        by_name.setdefault(alias, set()).update(op)
        for prefix, modules in _MODULES.items():
            if alias.startswith(prefix):
                short = alias[len(prefix):]
                for name in (short, *(f"{module}.{short}" for module in modules)):
                    by_name.setdefault(name, set()).update(op)
    return by_name


def operators_in(graph: Graph) -> Dict[str, str]:
    """Returns the operators of a graph's nodes by their names, those in loops included."""
    return {node.name: node.op for node in graph.nodes_within() if not node.is_variable}


def operator_names(graph: Graph) -> Set[str]:
    """Returns the names of a graph's nodes with operators, those in loops included."""
    return set(operators_in(graph))


def matching(pattern: str, *groups: Set[str]) -> List[Set[str]]:
    """Returns the names in each group that the pattern matches as a whole."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"keep: {pattern!r} is not a regular expression: {error}") from None
    return [{name for name in names if compiled.fullmatch(name)} for names in groups]


def kept_operators(graph: Graph, keep: Iterable[Any]) -> Set[str]:
    """Returns the names of a graph's operators that the entries match.

    Raises:
        TypeError: an entry is neither a string nor from `ops`.
        ValueError: an entry matches nothing or is not a regular expression.
    """
    operators = operators_in(graph)
    kept: Set[str] = set()
    for entry in [keep] if isinstance(keep, Operators) else iterator(
            keep, "keep takes regular expressions for names, and gluon_amp.ops(...)"):
        if isinstance(entry, Operators):
            matched = entry.among(operators)
        elif isinstance(entry, str):
            (matched,) = matching(entry, set(operators))
        else:
            raise TypeError("keep takes regular expressions for names, and gluon_amp.ops(...). "
                            f"Received: {entry!r}")
        if not matched:
            raise ValueError(matches_none(entry, operators, "symbol") if isinstance(
                entry, Operators) else matches_nothing(repr(entry), entry, operators, "symbol"))
        kept |= matched
    return kept


def matches_none(entry: Operators, operators: Mapping[str, str], where: str = "network") -> str:
    """Returns an error message for operators that a graph does not have."""
    return f"keep: {entry!r} matches nothing in this {where}, whose operators are " \
           f"{listed(sorted(set(operators.values())))}"


def matches_nothing(what: str, word: str, names: Iterable[str], where: str = "network") -> str:
    """Returns an error message for a name, with similar ones, or for an operator's with `ops`."""
    if word in _registered():
        remedy = f". All nodes of the operator: keep=gluon_amp.ops({word!r})"
    else:
        remedy = did_you_mean(word, sorted(filter(None, names)))
    return f"keep: {what} matches nothing in this {where}{remedy}"
