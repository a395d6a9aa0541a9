"""The graph that a CPU runs: the one that a GPU runs, with our operators where it is float16.

`for_cpu` takes a graph whose types are known. A node that reads or writes float16 becomes the
operator of ours that widens, runs MXNet's code and rounds (engine.h); all other nodes stay as
they are. Another grid than float16's has no arrays of its own: its tensors are float32 arrays,
and nodes say in attributes which of them are rounded.
"""
from typing import Dict, List, Mapping, Set

from .._mxnet import np
from ..cpu import library
from .graph import Entry, Graph, Node, bindings

HALF = "float16"
GRID, INPUTS, OUTPUTS = (f"__gluon_amp_{word}__" for word in ("grid", "inputs", "outputs"))

# They make or move halves, MXNet's own code does that in no time, and their gradients only move
# them back: left as they are.
_LEFT = frozenset("""
    Reshape Flatten expand_dims squeeze reshape_like BlockGrad _copy _zeros _ones _full _eye
    zeros_like ones_like _npx_reshape _np_reshape _np_squeeze _foreach _while_loop _cond
""".split())
_CASTS = frozenset("Cast amp_cast".split())
# Numbers that a float16 operator holds; a GPU has them in float16.
_CONSTANTS = ("scalar", "value", "a_min", "a_max")


def for_cpu(graph: Graph, types: Mapping[str, str], grid: str = HALF) -> Graph:
    """The graph for a CPU, with the same variables and outputs, of the same types.

    Args:
        types: the dtype of each variable.
        grid: what float16 tensors are rounded to: "float16", "bfloat16", or "float32",
            which rounds nothing and shows (to tests) that all else is as in float32.
    """
    library.load()
    return _Rewriting(graph, types, grid, inner=False).run()


def on_grid(number: str, grid: str) -> str:
    """A number from a node's attributes, rounded to the grid."""
    if grid == "float32":
        return number
    with np.errstate(over="ignore"):
        if grid == "float16":
            return repr(float(np.float16(float(number))))
        bits = np.float32(float(number)).view(np.uint32)
        bits += np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return repr(float((bits & np.uint32(0xFFFF0000)).view(np.float32)))


class _Rewriting:
    """One graph, from its inputs to its outputs. `inner`: a loop's body."""

    def __init__(self, graph: Graph, types: Mapping[str, str], grid: str, inner: bool):
        self.graph, self.grid, self.inner = graph, grid, inner
        self.halves = grid == HALF  # whether low tensors are arrays of halves
        self.types = graph.types(types)
        self.count: Dict[Node, int] = {}  # of outputs
        for entry in self.types:
            self.count[entry.node] = self.count.get(entry.node, 0) + 1
        self.users = graph.consumers()
        self.done: Dict[Entry, Entry] = {}
        self.norms: Set[Node] = set()  # layer norms that read and write halves

    def run(self) -> Graph:
        for node in self.graph.nodes():
            for i, entry in enumerate(self._rewritten(node)):
                self.done[Entry(node, i)] = entry
        outputs = [self.done[e] for e in self.graph.outputs]
        if not self.halves and not self.inner:
            outputs = [self._cast(new, HALF) if self._low(old) else new
                       for old, new in zip(self.graph.outputs, outputs)]
        return Graph(outputs)

    def _low(self, entry: Entry) -> bool:
        return self.types.get(entry) == HALF

    def _outputs(self, node: Node) -> List[Entry]:
        return [Entry(node, i) for i in range(self.count[node])]

    def _rewritten(self, node: Node) -> List[Entry]:
        """What stands for the node's outputs."""
        outputs = self._outputs(node)
        if self.halves and node.op in _CASTS and node.inputs[0].node in self.norms:
            return [self.done[node.inputs[0]]]
        if self.halves and self._stands_between_casts(node):
            self.norms.add(node)
            data = self.done[node.inputs[0].node.inputs[0]]
            new = node.like([data, *(self.done[e] for e in node.inputs[1:])])
            new.op = library.PREFIX + node.op
            return [Entry(new, e.output) for e in outputs]
        low = any(map(self._low, [*node.inputs, *outputs]))
        if node.is_variable:
            return [self._variable(node)]
        new = node.like(self.done[e] for e in node.inputs)
        if node.subgraphs:
            new.subgraphs = [self._body(node, i) for i in range(len(node.subgraphs))]
        if low:
            self._adapt(node, new)
        made = [Entry(new, e.output) for e in outputs]
        if low and self.halves and node.op not in _CASTS | _LEFT \
                and new.attrs.get("dtype") == HALF:
            # It chooses its code by this attribute, and there is none for halves.
            new.attrs["dtype"] = "float32"
            made = [self._cast(entry, HALF) if self._low(old) else entry
                    for old, entry in zip(outputs, made)]
        return made

    def _stands_between_casts(self, node: Node) -> bool:
        """Whether a float32 layer norm reads what was cast from float16, and all that read it
        cast it back: then it reads and writes halves itself, which gives the same numbers."""
        if node.op != "LayerNorm" or self._low(node.inputs[0]):
            return False
        cast = node.inputs[0].node
        users = self.users.get(Entry(node), [])
        return cast.op in _CASTS and self._low(cast.inputs[0]) and bool(users) \
            and not any(Entry(node, i) in self.users for i in (1, 2)) \
            and all(user is not None and user.op in _CASTS and self._low(Entry(user))
                    for user in users)

    def _adapt(self, node: Node, new: Node) -> None:
        """Gives a node of low type our operator, and its constants."""
        for key in _CONSTANTS:
            if key in new.attrs:
                new.attrs[key] = on_grid(new.attrs[key], self.grid)
        if not self.halves and new.attrs.get("dtype") == HALF:
            new.attrs["dtype"] = "float32"
        if node.op in _LEFT or not library.has_operator(node.op):
            return
        new.op = library.PREFIX + node.op
        if not self.halves:
            new.attrs.update({GRID: self.grid, INPUTS: self._digits(node.inputs),
                              OUTPUTS: self._digits(self._outputs(node))})

    def _digits(self, entries: List[Entry]) -> str:
        return "".join(str(int(self._low(e))) for e in entries)

    def _variable(self, node: Node) -> Entry:
        if self.halves:
            return Entry(node)
        # Attributes such as __dtype__ describe the float16 graph: leave them behind.
        entry = Entry(Node(node.op, node.name))
        return self._cast(entry, "float32") if self._low(Entry(node)) and not self.inner else entry

    def _cast(self, entry: Entry, dtype: str) -> Entry:
        name = f"{entry.node.name}_{entry.output}_as_{dtype}"
        return Entry(Node(library.PREFIX + "amp_cast", name, {"dtype": dtype}, [entry]))

    def _body(self, node: Node, which: int) -> Graph:
        body, inputs = node.subgraphs[which], bindings(node)[which]
        names = body.variables()
        types = {name: self.types[node.inputs[i]] or "float32" for name, i in zip(names, inputs)}
        rewritten = _Rewriting(body, types, self.grid, inner=True).run()
        assert rewritten.variables() == names, (node, names, rewritten.variables())
        return rewritten
