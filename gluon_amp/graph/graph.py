"""A symbol as a Python graph: read it, traverse it, rewrite it, write it back.

MXNet exposes the structure of a symbol only as JSON. `Graph` is that JSON with references in place
of indices. A tensor is an `Entry`: a node and the index of one of its outputs. Control flow
(`foreach`, `while_loop`, `cond`) holds graphs in `Node.subgraphs`. Their variables are bound by
position, so a rewrite must keep the order of the variables.
"""
import functools
import json
import re
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

from .._mxnet import mx
from ..cpu import library
from ..cpu.arrays import dtype_name

VARIABLE = "null"  # the op that MXNet's JSON gives to arguments and parameters
GROUP = "__ctx_group__"  # MXNet's attribute of nodes, which `group2ctx` maps to a device

_MXNET_VERSION = 10901  # the format of the JSON; newer versions of MXNet upgrade it
TYPE_FLAG = {dtype_name(dtype): flag  # MXNet's numbers for dtypes
             for flag, dtype in mx.nd.ndarray._DTYPE_MX_TO_NP.items() if dtype is not None}
TYPE_NAME = {flag: name for name, flag in TYPE_FLAG.items()}

Types = Tuple[Optional[str], ...]


# What json.dumps escapes. MXNet reads no \u, \b and \f; it writes and reads these characters as
# they are, which JSON does not allow.
_ESCAPE = re.compile(r"\\(u[0-9a-f]{4}|.)")


def _as_mxnet_reads(escape: "re.Match[str]") -> str:
    is_known = escape[1] in ('"', "\\", "n", "r", "t")
    character: str = escape[0] if is_known else json.loads(f'"{escape[0]}"')
    return character


class Entry(NamedTuple):
    """One output of a node."""
    node: "Node"
    output: int = 0


class Node:
    """An operator or a variable. Nodes compare by identity.

    Attributes:
        settings: what the engine does at the node beyond the operator, by name; build.py sets them.
            Symbols have the number of an entry of the engine's table instead.
    """
    __slots__ = ("attrs", "inputs", "name", "op", "settings", "subgraphs")

    def __init__(self, op: str, name: str, attrs: Optional[Mapping[str, str]] = None,
                 inputs: Iterable[Entry] = (), subgraphs: Iterable["Graph"] = ()):
        self.op, self.name = op, name
        self.attrs = dict(attrs or {})
        self.inputs = list(inputs)
        self.subgraphs = list(subgraphs)
        self.settings: Dict[str, str] = {}

    def __repr__(self) -> str:
        return f"{self.op}({self.name})"

    @property
    def is_variable(self) -> bool:
        return self.op == VARIABLE

    def is_set(self, key: str, default: bool = False) -> bool:
        """Whether a Boolean attribute is true."""
        return self.attrs.get(key, str(default)) in ("True", "true", "1")

    def like(self, inputs: Iterable[Entry]) -> "Node":
        """Returns a copy of the node with other inputs."""
        copy = Node(self.op, self.name, self.attrs, inputs, self.subgraphs)
        copy.settings = dict(self.settings)
        return copy

    def bodies(self, types: Mapping[Entry, Optional[str]]) -> List["Body"]:
        """Returns the graphs of a loop or a condition.

        Args:
            types: the types of the node's inputs.
        """
        places = bindings(self) if self.subgraphs else ()
        outside = [dict(zip(body.variables(), (self.inputs[i] for i in numbers)))
                   for body, numbers in zip(self.subgraphs, places)]
        return [Body(body, names, {name: types[e] or "float32" for name, e in names.items()})
                for body, names in zip(self.subgraphs, outside)]


class Body(NamedTuple):
    """A graph within a loop or a condition.

    Attributes:
        outside: for the name of each variable, the node's input that is bound to it.
        types: the types of its variables.
    """
    graph: "Graph"
    outside: Dict[str, Entry]
    types: Dict[str, str]


class Graph:
    """The nodes that a list of outputs depends on."""

    def __init__(self, outputs: Iterable[Entry]):
        self.outputs = list(outputs)

    @classmethod
    def read(cls, symbol: "mx.sym.Symbol") -> "Graph":
        # to remove casts, MXNet would create a copy that it never frees
        return cls._from_dict(json.loads(symbol.tojson(remove_amp_cast=False), strict=False))

    @classmethod
    def _from_dict(cls, data: Dict[str, Any]) -> "Graph":
        nodes: List[Node] = []
        for item in data["nodes"]:
            nodes.append(Node(item["op"], item["name"], item.get("attrs"),
                              [Entry(nodes[i[0]], i[1]) for i in item["inputs"]],
                              [cls._from_dict(sub) for sub in item.get("subgraphs", ())]))
        return cls(Entry(nodes[head[0]], head[1]) for head in data["heads"])

    def symbol(self, like: Optional["mx.sym.Symbol"] = None) -> "mx.sym.Symbol":
        """Returns the graph's symbol, of numpy mode if `like` is."""
        data = {**self._to_dict(), "attrs": {"mxnet_version": ["int", _MXNET_VERSION]}}
        text = json.dumps(data, ensure_ascii=False)
        symbol = mx.sym.load_json(_ESCAPE.sub(_as_mxnet_reads, text))
        return symbol.as_np_ndarray() if isinstance(like, mx.sym.numpy._Symbol) else symbol

    def _to_dict(self) -> Dict[str, Any]:
        nodes = self.nodes()
        number = {node: i for i, node in enumerate(nodes)}
        items = []
        for node in nodes:
            item: Dict[str, Any] = {
                "op": node.op, "name": node.name, "attrs": dict(node.attrs),
                "inputs": [[number[e.node], e.output, 0] for e in node.inputs]}
            if node.settings:
                item["attrs"][library.SETTINGS] = library.settings_attribute(node.settings)
            if node.subgraphs:
                item["subgraphs"] = [sub._to_dict() for sub in node.subgraphs]
            items.append(item)
        return {"nodes": items, "arg_nodes": [number[n] for n in nodes if n.is_variable],
                "node_row_ptr": list(range(len(nodes) + 1)),
                "heads": [[number[e.node], e.output, 0] for e in self.outputs]}

    def nodes(self) -> List[Node]:
        """Returns all nodes, inputs first, in MXNet's depth-first order."""
        order: List[Node] = []
        done = set()
        for output in self.outputs:
            stack: List[Tuple[Node, int]] = [(output.node, 0)]
            while stack:
                node, at = stack.pop()
                if node in done:
                    continue
                if at < len(node.inputs):
                    stack.append((node, at + 1))
                    stack.append((node.inputs[at].node, 0))
                else:
                    done.add(node)
                    order.append(node)
        return order

    def nodes_within(self) -> Iterator[Node]:
        """Yields all nodes; those in the body of a loop precede the loop."""
        for node in self.nodes():
            for body in node.subgraphs:
                yield from body.nodes_within()
            yield node

    def structure(self, marked: Collection[str] = ()) -> List[Any]:
        """Returns what the graph computes without the operators' names; equal for equal graphs.

        Operators with these names are marked.
        """
        nodes = self.nodes()
        number = {node: i for i, node in enumerate(nodes)}
        return [[(n.op, n.name if n.is_variable else n.name in marked, n.attrs,
                  [(number[e.node], e.output) for e in n.inputs],
                  [body.structure(marked) for body in n.subgraphs]) for n in nodes],
                [(number[e.node], e.output) for e in self.outputs]]

    def variables(self) -> List[str]:
        return [node.name for node in self.nodes() if node.is_variable]

    def mutated(self, inputs_of: Optional[Callable[[Node], Sequence[int]]] = None) -> Set[str]:
        """Returns the variables that operators mutate, such as moving averages; those of loops
        included. `inputs_of` returns the indices of other inputs to consider."""
        names: Set[str] = set()
        for node in self.nodes():
            entries = [node.inputs[i] for i in (inputs_of or mutated_inputs)(node)]
            for body in node.bodies(dict.fromkeys(node.inputs)):
                entries += [body.outside[name] for name in body.graph.mutated(inputs_of)]
            names.update(e.node.name for e in entries if e.node.is_variable)
        return names

    def consumers(self) -> Dict[Entry, List[Optional[Node]]]:
        """Returns the nodes that read each entry; None for an output of the graph."""
        users: Dict[Entry, List[Optional[Node]]] = {}
        for node in self.nodes():
            for entry in node.inputs:
                users.setdefault(entry, []).append(node)
        for entry in self.outputs:
            users.setdefault(entry, []).append(None)
        return users

    def rewrite(self, make: Callable[[Node, List[Entry]], Union[Node, Sequence[Entry]]]) -> "Graph":
        """Returns the graph with other operators on the same variables.

        Args:
            make: takes an operator and its new inputs, and returns its replacement: a node, or an
                entry for each of its outputs.
        """
        new_nodes: Dict[Node, Union[Node, Sequence[Entry]]] = {}

        def new(entry: Entry) -> Entry:
            after = new_nodes[entry.node]
            return Entry(after, entry.output) if isinstance(after, Node) else after[entry.output]

        for node in self.nodes():
            new_nodes[node] = node if node.is_variable else make(node, list(map(new, node.inputs)))
        graph = Graph(map(new, self.outputs))
        assert graph.variables() == self.variables()  # a loop binds its body's by position
        return graph

    def types(self, variables: Mapping[str, str]) -> Dict[Entry, Optional[str]]:
        """Infers the dtype of each entry from the dtypes of the variables."""
        types: Dict[Entry, Optional[str]] = {}
        for node in self.nodes():
            if node.is_variable:
                types[Entry(node)] = variables.get(node.name)
            else:
                outputs = infer(node, tuple(types.get(e) for e in node.inputs))
                types.update((Entry(node, i), t) for i, t in enumerate(outputs))
        return types


def bindings(node: Node) -> List[List[int]]:
    """Returns for each subgraph of a control-flow node the input that is bound to each of its
    variables, in the order of `Graph.variables`."""
    if node.op == "_foreach":  # lists the variable of each input: invert it
        places = [*integers(node, "in_data_locs"), *integers(node, "in_state_locs"),
                  *integers(node, "remain_locs")]
        return [sorted(range(len(places)), key=places.__getitem__)]
    if node.op == "_while_loop":
        return [integers(node, "cond_input_locs"), integers(node, "func_input_locs")]
    if node.op == "_cond":
        return [integers(node, f"{part}_input_locs") for part in ("cond", "then", "else")]
    raise ValueError(f"unknown control flow {node.op}; known: _foreach, _while_loop, _cond")


def state_variables(node: Node) -> List[int]:
    """Returns the indices of the loop-carried variables of a loop's body; none of a condition."""
    if node.op == "_cond":
        return []
    return integers(node, "in_state_locs" if node.op == "_foreach" else "func_var_locs")


def loop_states(node: Node) -> List[Entry]:
    """Returns the loop-carried inputs of a loop."""
    inputs = bindings(node)[-1]
    return [node.inputs[inputs[i]] for i in state_variables(node)]


def integers(node: Node, key: str) -> List[int]:
    """Returns an attribute's integers: none if it is missing or None. Python 2 wrote (3L, 3L)."""
    numbers = node.attrs.get(key, "None").strip("()[]").split(",")
    return [int(n.strip(" L")) for n in numbers if n.strip() not in ("", "None")]


def infer(node: Node, inputs: Types) -> Types:
    """Infers the dtypes of a node's outputs.

    Raises:
        mx.MXNetError: the operator does not accept these inputs.
    """
    if node.subgraphs:
        return _infer(node.op, _attributes(node), inputs, tuple(node.subgraphs))
    return _cached_infer(node.op, _attributes(node), inputs)


def mutated_inputs(node: Node) -> Tuple[int, ...]:
    """Returns the indices of the inputs that an operator mutates: its auxiliary states. A loop
    mutates none; the operators in its body may."""
    if node.is_variable or node.subgraphs:
        return ()
    return _mutated_inputs(node.op, _attributes(node), len(node.inputs))


def _attributes(node: Node) -> Tuple[Tuple[str, str], ...]:
    """Returns the attributes that MXNet's operator reads."""
    return tuple(sorted(item for item in node.attrs.items() if not item[0].startswith("__")))


def _infer(op: str, attrs: Tuple[Tuple[str, str], ...], inputs: Types,
           subgraphs: Tuple[Graph, ...] = ()) -> Types:
    variables = [Node(VARIABLE, f"in{i}", {} if t is None else {"__dtype__": str(TYPE_FLAG[t])})
                 for i, t in enumerate(inputs)]
    node = Node(op, "op", dict(attrs), map(Entry, variables), subgraphs)
    internals = Graph([Entry(node)]).symbol().get_internals()
    outputs = internals.infer_type_partial()[1]
    return tuple(None if t is None else dtype_name(t) for t in outputs[len(variables):])


_cached_infer = functools.lru_cache(maxsize=4096)(_infer)


@functools.lru_cache(maxsize=4096)
def _mutated_inputs(op: str, attrs: Tuple[Tuple[str, str], ...], count: int) -> Tuple[int, ...]:
    names = [f"in{i}" for i in range(count)]
    node = Node(op, "op", dict(attrs), [Entry(Node(VARIABLE, name)) for name in names])
    return tuple(map(names.index, Graph([Entry(node)]).symbol().list_auxiliary_states()))
