"""Puts the casts into a graph: the one pass behind `convert` and `convert_symbol`.

    for each node, inputs first:
        kept, or sensitive (softmax, losses, sums): cast its inputs to float32
        matrix work (convolution, dot, RNN):        cast its inputs to float16
        batched products, and what MXNet has no float16 code for on a GPU:
            run in float32, cast the result back
        norm: run in float32, cast the result back to the type of the data
        with a constant that float16 makes 0 or infinite (1e-12): cast its inputs to float32
        any other: the type of its inputs; where MXNet refuses the mixture,
            the widest type among them, parameters and constants following

MXNet has such a pass of its own (MXReducePrecisionSymbol). This one also knows
parameters that are float16 already, goes into the bodies of loops, gives norms'
results their type back, and leaves no amp_multicast where types are known.
"""
from contextlib import suppress
from typing import Collection, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from .._mxnet import mx
from ..cpu.arrays import HALVES
from ..formats import FLOAT32
from ..policy import Policy
from . import operators
from .graph import CASTS, Entry, Graph, Node, infer, loop_states

KEEP = "__gluon_amp_keep__"  # the attribute of nodes that stay float32
PRODUCT = "__gluon_amp_product__"  # of products whose inputs have a format of their own


def insert_casts(graph: Graph, types: Mapping[str, str], policy: Policy,
                 parameters: Iterable[str], keep: Collection[str] = (),
                 wide: Collection[str] = ()) -> Graph:
    """The graph with amp_cast nodes such that each node runs in the format that the policy
    gives it, for variables of these types. Formats that are no types of MXNet's arrays stand
    in it by their names; build.py knows what runs instead.

    Args:
        parameters: the variables that are no data: they follow the activations they meet.
        keep: nodes that stay float32, by name, besides those that hold the attribute KEEP.
        wide: variables that are float32 for the sake of their numbers, and follow nobody.
    """
    casting = _Casting(policy, types, set(parameters) - set(wide), keep, set(wide))
    return _with_bounds(Graph([casting.output(e) for e in casting.run(graph)]), policy)


def _with_bounds(graph: Graph, policy: Policy) -> Graph:
    """The graph, where what nan_to_num or clip makes finite is finite once it is cast, too."""
    formats = {each.type_name: each for each in (policy.between, policy.product, policy.output)
               if each.largest < FLOAT32.largest}
    users = graph.consumers()
    for node in graph.nodes():
        narrow = [user.attrs["dtype"] if user and user.op in CASTS else ""
                  for user in users.get(Entry(node), [])] if node.op in operators.BOUNDS else []
        for dtype in formats.keys() & set(narrow):
            made = node.like(node.inputs)
            made.attrs = operators.bounded(node, formats[dtype])
            if {dtype} == set(narrow):
                node.attrs = made.attrs
                continue
            made.name = f"{node.name}_{dtype}"
            for user in users[Entry(node)]:
                if user and user.op in CASTS and user.attrs["dtype"] == dtype:
                    user.inputs = [Entry(made)]
    return graph


def float32_variables(graph: Graph, policy: Policy, kept: Collection[str]) -> Set[str]:
    """The variables that stay float32 since a norm or a kept node reads them."""
    norms = operators.BATCH_NORMS | (operators.NORMS if policy.norm == FLOAT32 else frozenset())
    return {e.node.name for node in graph.nodes() if node.op in norms or node.name in kept
            for e in node.inputs if e.node.is_variable}


class _Casting:
    """One graph, or the body of a loop, while its casts are put in. "Weak" are parameters,
    constants, and what is computed of them alone: they take the type of the data they meet."""

    def __init__(self, policy: Policy, types: Mapping[str, str], weak: Set[str],
                 keep: Collection[str], wide: Set[str]):
        self.policy, self.keep = policy, keep
        self.between = policy.between.type_name
        # Where products do not round what they read, casts make arrays of their format.
        self.product = self.between if policy.products_round else policy.product.type_name
        # from the narrowest to the widest
        self.floats = [*HALVES, "float32", "float64"]
        if self.between not in self.floats:
            self.floats.insert(1, self.between)
        self.variables, self.weak_names, self.wide_names = types, weak, wide
        self.types: Dict[Entry, Optional[str]] = {}  # of new entries
        self.weak: Set[Entry] = set()
        self.wide: Set[Entry] = set()  # float32 for the sake of constants
        self.exact: Set[Entry] = set()  # indices and counts, and what is computed of them alone
        self.casts: Dict[Tuple[Entry, str], Entry] = {}

    def run(self, graph: Graph) -> List[Entry]:
        for node in graph.nodes():
            if node.is_variable:
                self.types[Entry(node)] = self.variables.get(node.name)
                if node.name in self.weak_names:
                    self.weak.add(Entry(node))
                if node.name in self.wide_names:
                    self.wide.add(Entry(node))
        return graph.rewrite(self._made).outputs

    def _made(self, node: Node, inputs: List[Entry]) -> List[Entry]:
        """The outputs of a node with its casts; norms and products may have some behind them."""
        made = node.like(self._inputs(node, inputs))
        exact: List[bool] = []  # whether each output is of indices, where there are bodies
        if node.subgraphs:
            made.subgraphs, exact = self._bodies(made)
        types = infer(made, tuple(self.types[e] for e in made.inputs))
        outputs = [Entry(made, i) for i, _ in enumerate(types)]
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
        if node.op in operators.PRODUCTS:
            product = self._product(node)
            if self.policy.products_round and product == self.product:
                made.attrs[PRODUCT] = "True"
            if product != self.between:
                outputs = [self.cast(Entry(made, i), self.between) for i, _ in enumerate(types)]
        return outputs

    def _fits(self, node: Node) -> bool:
        """Whether the narrowest format holds the node's constants: such as 1e-12 does not."""
        return operators.holds_numbers(node, self.policy.between)

    def _widens(self, node: Node, inputs: List[Entry]) -> bool:
        """Whether a node's result stays float32 for the sake of a constant, in it or before it."""
        return not self._fits(node) or any(e in self.wide for e in inputs) \
            and operators.runs_in(node) == operators.INPUTS

    def _is_exact(self, node: Node, inputs: List[Entry]) -> bool:
        """Whether a node gives indices or counts, or something of such and constants alone."""
        runs = operators.runs_in(node)
        known = [e in self.exact or e.node.op in operators.CONSTANTS for e in inputs
                 if self.types[e] in self.floats]
        return runs == operators.INDICES or runs == operators.INPUTS and all(known) \
            and any(e in self.exact for e in inputs)

    def _product(self, node: Node) -> str:
        """The type of what a product reads."""
        if operators.runs_in(node) == operators.BATCHED and (
                self.policy.batched == FLOAT32
                or node.op in operators.FLOAT32_ONLY and self.product == "float16"):
            return "float32"
        return self.product

    def _kept(self, node: Node) -> bool:
        return KEEP in node.attrs or node.name in self.keep

    def output(self, entry: Entry) -> Entry:
        """The entry in the type that the network returns; an index above 2048 is no float16."""
        if operators.runs_in(entry.node) == operators.FLOAT32 or entry in self.exact:
            return entry
        return self.cast(entry, self.policy.output.type_name)

    def cast(self, entry: Entry, dtype: str) -> Entry:
        """The entry in this floating type; what is no float stays as it is."""
        if self.types[entry] == dtype or self.types[entry] not in self.floats:
            return entry
        if (entry, dtype) not in self.casts:
            made = self.casts[entry, dtype] = Entry(self._cast_node(entry, dtype))
            self.types[made] = dtype
            if entry in self.weak:
                self.weak.add(made)
        return self.casts[entry, dtype]

    def _cast_node(self, entry: Entry, dtype: str) -> Node:
        if entry.node.op in operators.CONSTANTS:
            # Made in the type at once: MXNet infers shapes backward to constants
            # (an RNN's begin_state has an unknown batch), but not through a cast.
            node = entry.node.like(())
            node.attrs["dtype"] = dtype
            return node
        if entry.node.op == "_rnn_param_concat" and dtype in HALVES:
            # MXNet's float32 code for this takes longer than all casts
            return entry.node.like([self.cast(e, dtype) for e in entry.node.inputs])
        index = f"_{entry.output}" if entry.output else ""
        # amp_cast, which export leaves out by default; it does not know float64
        op = "Cast" if self.types[entry] == "float64" else "amp_cast"
        return Node(op, f"{entry.node.name}{index}_amp_cast_{dtype}", {"dtype": dtype}, [entry])

    def _inputs(self, node: Node, inputs: List[Entry]) -> List[Entry]:
        """The node's inputs in the types that it wants."""
        runs = operators.runs_in(node)
        if runs == operators.BATCH_NORM:  # float32 statistics, which are not cast
            wide = self._kept(node) or node.op in operators.FLOAT32_ONLY
            data = self.cast(inputs[0], "float32") if wide else inputs[0]
            return [data, *(self.cast(e, "float32") for e in inputs[1:3]), *inputs[3:]]
        if self._kept(node) or runs in (
                operators.LOSS, operators.FLOAT32, operators.INDICES, operators.WITHIN):
            return [self.cast(e, "float32") for e in inputs]
        if runs == operators.SENSITIVE:
            wide = not self._fits(node) or any(e in self.wide for e in inputs)
            wanted = "float32" if wide else self.policy.sensitive.type_name
            return [self.cast(e, wanted) for e in inputs]
        if runs == operators.NORM:
            wanted = self.policy.norm.type_name
            if node.op == "InstanceNorm":  # MXNet's takes float32 only
                wanted = "float32"
            return [self.cast(e, wanted) for e in inputs]
        if node.op in operators.PRODUCTS:
            product = self._product(node)
            lengths = node.op == "RNN" and node.attrs.get("use_sequence_length") in ("True", "1")
            count = len(inputs) - int(lengths)
            return [self.cast(e, product) for e in inputs[:count]] + inputs[count:]
        if any(self.types[e] == self.between for e in inputs) \
                and not self._fits(node):
            return [self.cast(e, "float32") for e in inputs]
        return self._agree(node, inputs)

    def _agree(self, node: Node, inputs: List[Entry]) -> List[Entry]:
        """The inputs as they are if MXNet takes them, else in their widest type."""
        floats = {self.types[e] for e in inputs} & set(self.floats)
        if len(floats) < 2 or node.subgraphs:
            return inputs
        with suppress(mx.MXNetError):
            # None: some operators do not refuse the mixture, but do not know its type either
            if None not in infer(node, tuple(self.types[e] for e in inputs)):
                return inputs
        strong = {self.types[e] for e in inputs if e not in self.weak} & set(self.floats)
        widest = max(strong or floats, key=lambda t: self.floats.index(t or "float16"))
        return [self.cast(e, widest or "float32") for e in inputs]

    def _bodies(self, node: Node) -> Tuple[List[Graph], List[bool]]:
        """The graphs of a control-flow node, and whether its outputs are indices. A loop's states
        keep their types, and the branches of a condition return the same ones."""
        bodies = []
        for body in node.bodies(self.types):
            weak = {name for name, e in body.outside.items() if e in self.weak}
            wide = {name for name, e in body.outside.items() if e in self.wide}
            inner = _Casting(self.policy, body.types, weak, self.keep, wide)
            bodies.append((inner, inner.run(body.graph)))
        if node.op in ("_cond", "_while_loop"):  # the condition, which MXNet wants in float32
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
        made = [_with_bounds(Graph(outputs), self.policy) for _, outputs in bodies]
        return made, [e in inner.exact for e in outputs]
