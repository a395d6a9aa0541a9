"""Inserts casts into a graph: the pass that `convert` and `convert_symbol` share.

    for each node, inputs first:
        kept, or sensitive (softmax, losses, sums): cast its inputs to float32
        with sparse tensors (csr, row_sparse):      the same, and they have no casts, whose
                                                    results MXNet would make dense
        matrix work (convolution, dot, RNN):        cast its inputs to float16
        batched products, and operators without float16 kernels on a GPU:
            run in float32, cast the result back
        norm: run in float32, cast the result back to the type of the data
        with a constant that float16 makes 0 or infinite (1e-12): cast its inputs to float32
        any other: the type of its inputs; if MXNet refuses the mixture,
            the widest type among the activations, to which parameters and constants are cast

    data in float64, by a network's own cast, stays in sensitive operators and most norms

MXNet's own pass is MXReducePrecisionSymbol. Unlike it, this one supports float16 parameters and
converts the bodies of loops. It casts the results of norms back, and inserts no amp_multicast if
types are known.
"""
from contextlib import suppress
from typing import Collection, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from .._mxnet import mx
from ..cpu.arrays import TYPES_16BIT
from ..formats import FLOAT32
from ..policy import Policy
from . import operators
from .graph import GROUP, Entry, Graph, Node, infer, loop_states, mutated_inputs

STORAGE = "__storage_type__"  # MXNet's attribute of variables
SPARSE = {"row_sparse": "1", "csr": "2"}  # its values


def insert_casts(graph: Graph, types: Mapping[str, str], policy: Policy,
                 parameters: Iterable[str], keep: Collection[str] = (),
                 wide: Collection[str] = ()) -> Graph:
    """Returns the graph with amp_cast nodes, so that each node runs in its policy's format.

    Args:
        graph: a graph without casts.
        types: the type of each variable.
        policy: the formats.
        parameters: the variables that are cast to the type of the activations they meet.
        keep: names of nodes that stay float32.
        wide: float32 variables with values beyond float16, which are never cast.
    """
    casting = _Casting(policy, types, set(parameters) - set(wide), keep, set(wide))
    return _with_bounds(Graph([casting.output(e) for e in casting.run(graph)]), policy)


def _with_bounds(graph: Graph, policy: Policy) -> Graph:
    """Lowers the bounds of nan_to_num and clip so that their results stay finite when cast."""
    bounded = [node for node in graph.nodes() if node.op in operators.BOUNDS]
    if not bounded:
        return graph
    formats = {each.name: each for each in (policy.compute, policy.output)
               if each.largest < FLOAT32.largest}
    users = graph.consumers()
    for node in bounded:
        narrow = [user.attrs["dtype"] if user and user.op in operators.CASTS else ""
                  for user in users.get(Entry(node), [])]
        for dtype in formats.keys() & set(narrow):
            copy = node.like(node.inputs)
            copy.attrs = operators.bounded(node, formats[dtype])
            if {dtype} == set(narrow):
                node.attrs = copy.attrs
                continue
            copy.name = f"{node.name}_{dtype}"
            for user in users[Entry(node)]:
                if user and user.op in operators.CASTS and user.attrs["dtype"] == dtype:
                    user.inputs = [Entry(copy)]
    return graph


def float32_variables(graph: Graph, policy: Policy, kept: Collection[str]) -> Set[str]:
    """Returns the variables that stay float32: sparse ones, and those that a norm, a kept node or
    an operator with sparse tensors reads."""
    norms = operators.BATCH_NORMS | (operators.NORMS if policy.norm == FLOAT32 else frozenset())
    sparse = sparse_nodes(graph)
    return {e.node.name for node in graph.nodes()
            if node.op in norms or node.name in kept or touches_sparse(node, sparse)
            for e in node.inputs if e.node.is_variable}


class _Casting:
    """The insertion of casts into one graph, or into the body of a loop.

    "Weak" entries are parameters, constants, and results of these alone. They are cast to the type
    of the data they meet.
    """

    def __init__(self, policy: Policy, types: Mapping[str, str], weak: Set[str],
                 keep: Collection[str], wide: Set[str]):
        self.policy, self.keep = policy, keep
        self.compute = policy.compute.name
        self.floats = [*TYPES_16BIT, "float32", "float64"]  # from the narrowest to the widest
        self.variables, self.weak_names, self.wide_names = types, weak, wide
        self.types: Dict[Entry, Optional[str]] = {}  # types of new entries
        self.weak: Set[Entry] = set()
        self.wide: Set[Entry] = set()  # float32 because of a constant beyond float16
        self.exact: Set[Entry] = set()  # indices, counts, and results of these alone
        self.sparse: Set[Node] = set()  # old and new nodes
        self.casts: Dict[Tuple[Entry, str], Entry] = {}

    def run(self, graph: Graph, sparse: Collection[str] = ()) -> List[Entry]:
        """Returns the new outputs. `sparse` names sparse variables that are not declared."""
        self.sparse = sparse_nodes(graph, sparse)
        for node in graph.nodes():
            if node.is_variable:
                self.types[Entry(node)] = self.variables.get(node.name)
                if node.name in self.weak_names:
                    self.weak.add(Entry(node))
                if node.name in self.wide_names:
                    self.wide.add(Entry(node))
        return graph.rewrite(self._made).outputs

    def _made(self, node: Node, inputs: List[Entry]) -> List[Entry]:
        """Returns the outputs of a node with its casts, before and after it."""
        new = node.like(self._inputs(node, inputs))
        if node in self.sparse:
            self.sparse.add(new)
        exact: List[bool] = []  # for each output of a node with bodies: whether it is an index
        if node.subgraphs:
            new.subgraphs, exact = self._bodies(new)
        types = infer(new, tuple(self.types[e] for e in new.inputs))
        outputs = [Entry(new, i) for i, _ in enumerate(types)]
        for output, dtype in zip(outputs, types):
            self.types[output] = dtype
            if exact[output.output] if exact else self._is_exact(node, inputs):
                self.exact.add(output)
            elif dtype == "float32" and self._widens(node, inputs):
                self.wide.add(output)
            elif all(e in self.weak for e in inputs) and self._fits(node):
                self.weak.add(output)
        if self._kept(node):
            return outputs
        if operators.gives_back(node):
            data = self.types[inputs[0]]
            if data is not None and data in self.floats and data != types[0]:
                outputs[0] = self.cast(outputs[0], data)
        if node.op in operators.PRODUCTS and self._product(node) != self.compute:
            outputs = [self.cast(Entry(new, i), self.compute) for i, _ in enumerate(types)]
        return outputs

    def _fits(self, node: Node) -> bool:
        """Whether the narrowest format holds the node's constants; float16 lacks 1e-12."""
        return operators.holds_numbers(node, self.policy.compute)

    def _widens(self, node: Node, inputs: List[Entry]) -> bool:
        """Whether a node's result stays float32 because of a constant, in it or before it."""
        return not self._fits(node) or any(e in self.wide for e in inputs) \
            and operators.runs_in(node) == operators.INPUTS

    def _is_exact(self, node: Node, inputs: List[Entry]) -> bool:
        """Whether a node returns indices or counts, or a result of these and constants alone."""
        runs = operators.runs_in(node)
        exact = [e in self.exact or e.node.op in operators.CONSTANTS for e in inputs
                 if self.types[e] in self.floats]
        return runs == operators.INDICES or runs == operators.INPUTS and all(exact) \
            and any(e in self.exact for e in inputs)

    def _product(self, node: Node) -> str:
        """Returns the type of a product's inputs."""
        if operators.runs_in(node) == operators.BATCHED and (
                self.policy.batched == FLOAT32
                or node.op in operators.COLUMNS["no_float16_kernel"] and self.compute == "float16"):
            return "float32"
        return self.compute

    def _kept(self, node: Node) -> bool:
        return node.name in self.keep or touches_sparse(node, self.sparse)

    def output(self, entry: Entry) -> Entry:
        """Returns the entry in the type of the network's outputs; indices stay float32."""
        if operators.runs_in(entry.node) == operators.FLOAT32 or entry in self.exact:
            return entry
        return self.cast(entry, self.policy.output.name)

    def cast(self, entry: Entry, dtype: str) -> Entry:
        """Returns the entry in this floating type; integers and sparse tensors keep theirs."""
        if self.types[entry] == dtype or self.types[entry] not in self.floats \
                or entry.node in self.sparse:
            return entry
        if (entry, dtype) not in self.casts:
            result = self.casts[entry, dtype] = Entry(self._cast_node(entry, dtype))
            self.types[result] = dtype
            if entry in self.weak:
                self.weak.add(result)
        return self.casts[entry, dtype]

    def _cast_node(self, entry: Entry, dtype: str) -> Node:
        if entry.node.op in operators.CONSTANTS - operators.NOT_CREATED.get(dtype, frozenset()):
            # Created in the type without a cast: MXNet does not infer shapes backward through
            # a cast, and an RNN's begin_state has an unknown batch size.
            node = entry.node.like(())
            node.attrs["dtype"] = dtype
            return node
        if entry.node.op == "_rnn_param_concat" and dtype in TYPES_16BIT:
            # MXNet's float32 kernel is slower than the casts of all inputs
            return entry.node.like([self.cast(e, dtype) for e in entry.node.inputs])
        index = f"_{entry.output}" if entry.output else ""
        # export removes amp_cast by default; amp_cast does not support float64
        op = "Cast" if "float64" in (self.types[entry], dtype) else "amp_cast"
        attrs = {"dtype": dtype}
        if GROUP in entry.node.attrs:
            attrs[GROUP] = entry.node.attrs[GROUP]
        return Node(op, f"{entry.node.name}{index}_amp_cast_{dtype}", attrs, [entry])

    def _inputs(self, node: Node, inputs: List[Entry]) -> List[Entry]:
        """Returns the node's inputs, cast to the types in which it runs. A variable that the node
        mutates has no cast: the node would mutate the cast's result."""
        mutated = [inputs[i] for i in mutated_inputs(node)]
        return [before if before in mutated and before.node.is_variable else after
                for before, after in zip(inputs, self._cast_inputs(node, inputs))]

    def _cast_inputs(self, node: Node, inputs: List[Entry]) -> List[Entry]:
        runs = operators.runs_in(node)
        if runs == operators.BATCH_NORM:  # statistics are float32
            wide = self._kept(node) or node.op in operators.COLUMNS["no_float16_kernel"] \
                or self.types[inputs[0]] == "float64"
            data = self.cast(inputs[0], "float32") if wide else inputs[0]
            return [data, *(self.cast(e, "float32") for e in inputs[1:3]), *inputs[3:]]
        if self._kept(node):  # the float32 network's types
            return [self.cast(e, "float32") if self.types[e] in TYPES_16BIT else e for e in inputs]
        if runs in (operators.LOSS, operators.FLOAT32, operators.INDICES, operators.WITHIN):
            return [self.cast(e, "float32") for e in inputs]
        if runs == operators.SENSITIVE:
            wide = not self._fits(node) or any(e in self.wide for e in inputs)
            return self._in(inputs, "float32" if wide else self.policy.sensitive.name)
        if runs == operators.NORM:
            if node.op in operators.COLUMNS["no_float64"]:
                return [self.cast(e, "float32") for e in inputs]
            return self._in(inputs, self.policy.norm.name)
        if node.op in operators.PRODUCTS:
            product = self._product(node)
            lengths = node.op == "RNN" and node.is_set("use_sequence_length")
            count = len(inputs) - int(lengths)
            return [self.cast(e, product) for e in inputs[:count]] + inputs[count:]
        if any(self.types[e] == self.compute for e in inputs) \
                and not self._fits(node):
            return [self.cast(e, "float32") for e in inputs]
        return self._agree(node, inputs)

    def _in(self, inputs: List[Entry], dtype: str) -> List[Entry]:
        """Returns the inputs in this type, or in float64 if the data has it."""
        wanted = "float64" if self.types[inputs[0]] == "float64" else dtype
        return [self.cast(e, wanted) for e in inputs]

    def _agree(self, node: Node, inputs: List[Entry]) -> List[Entry]:
        """Returns the inputs unchanged if MXNet accepts them, else in their widest type."""
        floats = {self.types[e] for e in inputs} & set(self.floats)
        if len(floats) < 2 or node.subgraphs:
            return inputs
        with suppress(mx.MXNetError):
            # None: some operators accept the mixture, but infer no type for it
            if None not in infer(node, tuple(self.types[e] for e in inputs)):
                return inputs
        strong = {self.types[e] for e in inputs if e not in self.weak} & set(self.floats)
        widest = max(strong or floats, key=lambda t: self.floats.index(t or "float16"))
        return [self.cast(e, widest or "float32") for e in inputs]

    def _bodies(self, node: Node) -> Tuple[List[Graph], List[bool]]:
        """Returns the bodies of a control-flow node, and whether each output is an index.

        A loop's states keep their types. Both branches of a condition return the same types.
        """
        bodies = []
        for body in node.bodies(self.types):
            weak = {name for name, e in body.outside.items() if e in self.weak}
            wide = {name for name, e in body.outside.items() if e in self.wide}
            sparse = {name for name, e in body.outside.items() if e.node in self.sparse}
            inner = _Casting(self.policy, body.types, weak, self.keep, wide)
            bodies.append((inner, inner.run(body.graph, sparse)))
        if node.op in ("_cond", "_while_loop"):  # MXNet requires a float32 condition
            condition, outputs = bodies[0]
            outputs[:] = [condition.cast(e, "float32") for e in outputs]
        if node.op == "_cond":
            _, (then, yes), (otherwise, no) = bodies
            for i, (a, b) in enumerate(zip(yes, no)):
                if then.types[a] != otherwise.types[b]:
                    yes[i], no[i] = then.cast(a, "float32"), otherwise.cast(b, "float32")
        else:
            inner, outputs = bodies[-1]
            first = int(node.attrs["num_out_data"])
            for i, state in enumerate(loop_states(node), first):
                outputs[i] = inner.cast(outputs[i], self.types[state] or "float32")
        inner, outputs = bodies[-1]
        graphs = [_with_bounds(Graph(outputs), self.policy) for _, outputs in bodies]
        return graphs, [e in inner.exact for e in outputs]


def sparse_nodes(graph: Graph, variables: Collection[str] = ()) -> Set[Node]:
    """Returns the variables that are sparse, and the operators whose results may be.

    Args:
        graph: the graph.
        variables: names of sparse variables besides those that are declared.
    """
    results: Set[Node] = set()
    for node in graph.nodes():
        if node.is_variable:
            sparse = node.name in variables or node.attrs.get(STORAGE) in SPARSE.values()
        else:
            may_be = node.op in operators.COLUMNS["may_be_sparse"]
            sparse = may_be and any(e.node in results for e in node.inputs) \
                or any(node.attrs.get(key) in SPARSE for key in ("stype", "forward_stype"))
        if sparse:
            results.add(node)
    return results


def touches_sparse(node: Node, sparse: Collection[Node]) -> bool:
    """Whether an operator reads or returns a sparse tensor, or gives a weight a sparse gradient."""
    return node in sparse or any(e.node in sparse for e in node.inputs) \
        or node.op == "_contrib_SparseEmbedding" \
        or "sparse_grad" in node.attrs and node.is_set("sparse_grad")
