"""Writes a float16 graph as one that a CPU runs: float32 arrays on the float16 grid.

`lower` takes a graph whose types are known and returns one with the same
variables and outputs, of the same types, in which

- a float16 variable is widened, a float16 output narrowed;
- every other float16 tensor is a float32 array of float16 values: the operator
  that makes it computes in float32, and its result is rounded once;
- gradients are rounded where the tensor's values were, since the backward of
  each of our operators rounds (see kernels.cc).

Rounding costs a pass over memory, so it is left out after operators that are
exact on the grid, and done inside our own operators where one follows: batch
norm, addition and the activation behind them become one operator.
"""
from typing import Collection, Dict, Iterable, List, Mapping, Optional, Set

from ..graph import Entry, Graph, Node, bindings
from .exact import is_exact, on_grid
from .library import load

HALF = "float16"
# MXNet adds up this many gradients with add_n, and more of them in place. Extension
# operators are never told to add in place, so they must not meet such a sum.
_MOST_CONSUMERS = 8
# Operators that read and write oneDNN's blocked arrays. MXNet's static executor keeps
# the plain copy that it makes of one for an operator of ours; a Reshape between them
# makes that copy where the memory plan knows it, and is free on a plain array.
_BLOCKED = frozenset("Convolution Pooling".split())


def lower(graph: Graph, types: Mapping[str, str], training: bool,
          added: Collection[str] = (), grid: str = HALF) -> Graph:
    """The graph for a CPU.

    Args:
        types: the dtype of each variable.
        training: whether batch norms use the batch's statistics.
        added: variables whose gradients are added to what is there (grad_req "add").
        grid: what float16 tensors are rounded to: "float16", "bfloat16", or "float32",
            which rounds nothing and shows (to tests) that all else is as in float32.
    """
    load()
    return _Lowering(graph, types, training, added, grid, inner=False).run()


class _Lowering:
    """One graph, from its inputs to its outputs. `inner`: a loop's body, all of whose
    variables and outputs are float32 arrays already."""

    def __init__(self, graph: Graph, types: Mapping[str, str], training: bool,
                 added: Collection[str], grid: str, inner: bool):
        self.graph, self.training, self.added, self.inner = graph, training, added, inner
        self.grid = grid
        self.types = graph.types(types)
        self.users = graph.consumers()
        self.outputs: Dict[Node, List[Entry]] = {}
        for entry in self.types:
            self.outputs.setdefault(entry.node, []).append(entry)
        self.done: Dict[Entry, Entry] = {}     # old entry -> new, float16 values rounded
        self.pending: Dict[Entry, Entry] = {}  # old entry -> new, not rounded yet
        self.core: Dict[Node, Node] = {}       # activation -> the norm or addition before it
        self.norm: Dict[Node, Node] = {}       # addition -> the norm that takes it in
        self.absorbed: Set[Node] = set()

    def run(self) -> Graph:
        nodes = self.graph.nodes()
        self._find_groups(nodes)
        for node in nodes:
            if node not in self.absorbed:
                self._lower(node)
        return Graph(self._output(e) for e in self.graph.outputs)

    def half(self, entry: Entry) -> bool:
        return self.types.get(entry) == HALF

    # ---- which nodes become one -------------------------------------------

    def _only_user(self, node: Node) -> Optional[Node]:
        users = self.users.get(Entry(node), [])
        return users[0] if len(users) == 1 else None

    def _find_groups(self, nodes: List[Node]) -> None:
        for node in nodes:
            if node.op == "_contrib_BatchNormWithReLU":
                continue  # has its activation already
            if self._is_norm(node):
                user = self._only_user(node)
                # In a loop's body the residual would change the order of the variables.
                if user and self._is_add(user) and user not in self.norm and not self.inner:
                    self.norm[user] = node
                    self.absorbed.add(node)
            if self._is_norm(node) and node not in self.absorbed or self._is_add(node):
                user = self._only_user(node)
                if user and self._activation(user):
                    self.core[user] = node
                    self.absorbed.add(node)

    def _is_add(self, node: Node) -> bool:
        return node.op == "elemwise_add" and all(map(self.half, node.inputs))

    def _is_norm(self, node: Node) -> bool:
        return (node.op in ("BatchNorm", "_contrib_BatchNormWithReLU")
                and self.half(node.inputs[0])
                and int(node.attrs.get("axis", 1)) == 1
                and not _flag(node, "output_mean_var")
                and not any(Entry(node, i) in self.users for i in (1, 2)))

    # ---- one node ----------------------------------------------------------

    def _lower(self, node: Node) -> None:
        core = self.core.get(node, node)
        act = self._activation(node)
        if node.is_variable:
            self._variable(node)
        elif node.op in ("Cast", "amp_cast"):
            self._cast(node)
        elif self._is_norm(core):
            self._norm(core, None, act, Entry(node))
        elif core in self.norm:
            self._norm(self.norm[core], core, act, Entry(node))
        elif self._is_add(core):
            self.done[Entry(node)] = self._make("_gluon_amp_add", core,
                                                map(self._raw, core.inputs), act)
        elif act and self._is_raw(node.inputs[0]):
            self.done[Entry(node)] = self._make("_gluon_amp_round", node,
                                                [self._raw(node.inputs[0])], act)
        else:
            self._other(node)

    def _variable(self, node: Node) -> None:
        # Attributes such as __dtype__ describe the float16 graph: leave them behind.
        entry = Entry(Node(node.op, node.name))
        if self.half(Entry(node)) and not self.inner:
            entry = self._make("_gluon_amp_widen", node, [self._apart(node, entry)])
        self.done[Entry(node)] = entry

    def _cast(self, node: Node) -> None:
        source, target = node.inputs[0], Entry(node)
        value = self.done.get(source) or self.pending[source]
        if not self.half(target):
            # Back to float32: the array is one. Other types: MXNet casts.
            same = self.half(source) and self.types[target] == "float32"
            value = self._value(source)
            self.done[target] = value if same else Entry(node.like([value]))
        elif self.half(source):
            self.done[target] = self._value(source)
        else:
            if self.types[source] != "float32":
                value = Entry(Node("Cast", f"{node.name}_float32", {"dtype": "float32"}, [value]))
            self.pending[target] = self._apart(node, value, len(self.users[source]))

    def _norm(self, norm: Node, add: Optional[Node], act: Optional[Dict[str, str]],
              target: Entry) -> None:
        if norm.op == "_contrib_BatchNormWithReLU":
            act = {"act": "relu"}
        training = self.training and not _flag(norm, "use_global_stats")
        attrs = {"training": str(int(training)), "residual": str(int(add is not None)),
                 "eps": norm.attrs.get("eps", "1e-3"),
                 "momentum": norm.attrs.get("momentum", "0.9"),
                 "fix_gamma": str(int(_flag(norm, "fix_gamma", True))), **(act or {})}
        inputs = [self._raw(norm.inputs[0]),
                  *(self._apart(e.node, self.done[e]) for e in norm.inputs[1:3]),
                  *(self.done[e] for e in norm.inputs[3:5])]
        if add is not None:
            other = next(e for e in add.inputs if e != Entry(norm))
            inputs.append(self._value(other, ours=True))
        self.done[target] = self._make("_gluon_amp_batch_norm", norm, inputs, attrs)

    def _other(self, node: Node) -> None:
        new = node.like(map(self._value, node.inputs))
        outputs = self.outputs[node]
        if any(map(self.half, [*node.inputs, *outputs])):
            new.attrs = self._constants(node.attrs)
        if node.op == "Deconvolution":
            new = _in_float64(new)
        if node.subgraphs:
            new.subgraphs = [self._body(node, i) for i in range(len(node.subgraphs))]
        rounded = node.subgraphs or is_exact(node)
        for entry in outputs:
            now = Entry(new, entry.output)
            if self.half(entry) and not rounded:
                self.pending[entry] = now
            else:
                self.done[entry] = now

    def _body(self, node: Node, which: int) -> Graph:
        body, inputs = node.subgraphs[which], bindings(node)[which]
        names = body.variables()
        types = {name: self.types[node.inputs[i]] or "float32" for name, i in zip(names, inputs)}
        lowered = _Lowering(body, types, self.training, names, self.grid, inner=True).run()
        assert lowered.variables() == names, (node, names, lowered.variables())
        return lowered

    def _output(self, entry: Entry) -> Entry:
        if not self.half(entry) or self.inner:
            return self._value(entry)
        return self._make("_gluon_amp_narrow", entry.node, [self._raw(entry)])

    # ---- what a node reads -------------------------------------------------

    def _is_raw(self, entry: Entry) -> bool:
        """Whether an operator of ours may read the entry before it is rounded."""
        return (entry in self.pending and entry not in self.done
                and len(self.users[entry]) == 1)

    def _value(self, entry: Entry, ours: bool = False) -> Entry:
        """The new entry, rounded. `ours`: one of our operators will read it."""
        if entry not in self.done:
            self.done[entry] = self._make("_gluon_amp_round", entry.node,
                                          [self._apart(entry.node,
                                                       self._plain(entry, self.pending[entry]))])
        value = self.done[entry]
        return self._apart(entry.node, value, len(self.users[entry])) if ours else value

    def _raw(self, entry: Entry) -> Entry:
        """The new entry for an operator of ours that rounds what it reads."""
        if self._is_raw(entry):
            return self._apart(entry.node, self._plain(entry, self.pending[entry]))
        return self._value(entry, ours=True)

    def _plain(self, entry: Entry, new: Entry) -> Entry:
        if entry.node.op not in _BLOCKED:
            return new
        return Entry(Node("Reshape", f"{entry.node.name}_plain", {"shape": "(-2,)"}, [new]))

    def _apart(self, node: Node, entry: Entry, users: int = 1) -> Entry:
        """A copy of an entry to which MXNet may add gradients in place; else the entry."""
        if users > _MOST_CONSUMERS or entry.node.is_variable and entry.node.name in self.added:
            return Entry(Node("_copy", f"{node.name}_apart", {}, [entry]))
        return entry

    def _activation(self, node: Node) -> Optional[Dict[str, str]]:
        """The attributes by which our operators know this activation, if they do."""
        if node.op == "relu" or node.op == "Activation" and node.attrs["act_type"] == "relu":
            return {"act": "relu"}
        if node.op == "LeakyReLU" and node.attrs.get("act_type") == "gelu":
            return {"act": "gelu"}
        if node.op == "clip":
            lo, hi = (on_grid(node.attrs[key], self.grid) for key in ("a_min", "a_max"))
            return {"act": "clip", "lo": lo, "hi": hi}
        return None

    def _constants(self, attrs: Mapping[str, str]) -> Dict[str, str]:
        """A float16 operator's attributes for float32 arrays: its constants are float16's."""
        new = dict(attrs)
        if new.get("dtype") == HALF:
            new["dtype"] = "float32"
        for key in ("scalar", "value", "a_min", "a_max"):
            if key in new:
                new[key] = on_grid(new[key], self.grid)
        return new

    def _make(self, op: str, origin: Node, inputs: Iterable[Entry],
              attrs: Optional[Mapping[str, str]] = None) -> Entry:
        name = origin.name + op.replace("_gluon_amp", "")
        grid = {"grid": self.grid} if self.grid != HALF else {}
        return Entry(Node(op, name, {**(attrs or {}), **grid}, inputs))


def _flag(node: Node, name: str, otherwise: bool = False) -> bool:
    return node.attrs.get(name, str(otherwise)) in ("True", "1", "true")


def _in_float64(node: Node) -> Node:
    """oneDNN's deconvolution in MXNet 1.9.1 crashes when its weights are no variable, as ours
    are not; in float64 MXNet uses its own."""
    def cast(entry: Entry, dtype: str, name: str) -> Node:
        return Node("Cast", f"{node.name}_{name}", {"dtype": dtype}, [entry])

    wide = node.like(Entry(cast(e, "float64", f"in{i}")) for i, e in enumerate(node.inputs))
    return cast(Entry(wide), "float32", "float32")
