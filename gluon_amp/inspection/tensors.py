"""Which tensors a converted network's graph has, in order of computation."""
from dataclasses import dataclass, field
from typing import (
    Any,
    Collection,
    Container,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

from ..formats import FLOAT32, FORMATS, Format
from ..graph.build import LEFT_ALONE
from ..graph.graph import CASTS, Entry, Graph, Node, bindings, state_variables
from ..graph.operators import CAST_BACK, LOSSES
from ..policy import Policy
from .statistics import Counted, Counts, Key, added_up, compared


@dataclass
class Tensor:
    """A tensor that was watched.

    Attributes:
        key: its node's name, whether it is a gradient, and the number of the output or input.
        kind: "output", "gradient", or "weight gradient".
        op: the operator that computes it.
        place: when it is computed: forward passes count up, backward passes go on counting.
        format: the format that it has.
        reads: keys of the tensors that it is computed from.
        variables: names of the data and parameters that its node reads.
        carried: in a loop, those that it reads of the round before.
        gradients: of an output, the tensors that its gradient is the sum of.
        counts: what was counted, over all steps.
        snr: against the float32 step, in dB, the worst of the steps; None without a reference.
        beyond: whether the float32 step has numbers in it that its format does not hold.
        worths: by how much of the loss its own rounding moves it, of each step; see worth.py.
        by_chance: of products, the same if large errors met large gradients by chance only.
        largest: the exponent of the largest number of each step; see outliers.py.
    """
    key: Key
    kind: str
    op: str
    place: int
    format: Format
    reads: List[Key] = field(repr=False, default_factory=list)
    carried: List[Key] = field(repr=False, default_factory=list)
    gradients: List[Key] = field(repr=False, default_factory=list)
    counts: Optional[Counts] = field(repr=False, default=None)
    snr: Optional[float] = None
    beyond: bool = False
    worths: List[float] = field(repr=False, default_factory=list)
    by_chance: List[float] = field(repr=False, default_factory=list)
    largest: List[int] = field(repr=False, default_factory=list)
    variables: List[str] = field(repr=False, default_factory=list)

    @property
    def name(self) -> str:
        """For people: conv0_fwd, or "gradient of conv0_fwd's input 0"."""
        if not self.key.backward:
            return self.key.node + (f"[{self.key.which}]" if self.key.which else "")
        return f"gradient of {self.key.node}'s input {self.key.which}"

    def join(self, other: "Tensor") -> None:
        """Takes over what another one of its name is computed from and goes to."""
        for name in ("reads", "carried", "gradients", "variables"):
            setattr(self, name, list(dict.fromkeys(getattr(self, name) + getattr(other, name))))
        self.format = other.format if other.is_low else self.format

    @property
    def is_low(self) -> bool:
        """Whether its format may lose what float32 holds."""
        return self.format != FLOAT32

    @property
    def low_snr(self) -> float:
        """In dB: rounding alone leaves far more than that in a tensor that the format suits."""
        return max(6.02 * (self.format.fraction + 1) - 26, 10.0)


class Layout:
    """The nodes of graphs in order, and the tensors that they make.

    Args:
        graphs: with their casts, in the order in which they run, and their variables' types.
    """

    def __init__(self, graphs: Sequence[Tuple[Graph, Mapping[str, str]]], policy: Policy,
                 parameters: Collection[str]) -> None:
        self.nodes: Dict[str, Node] = {}
        self.alike: Dict[str, List[Node]] = {}  # of one name: those of a block called several times
        self.users: Dict[Entry, List[Optional[Node]]] = {}
        self.types: Dict[Entry, Optional[str]] = {}
        # Of bodies of loops: what their variables stand for, and what becomes of their outputs
        self.outside: Dict[Node, Entry] = {}
        self.inside: Dict[Tuple[Node, Entry], List[Node]] = {}
        self.given: Dict[Entry, List[Entry]] = {}
        self.carried: Dict[Node, Entry] = {}  # by the variable of a state
        for graph, types in graphs:
            self._add(graph, types)
        self.order = {name: i for i, name in enumerate(self.nodes)}
        self.formats = {**FORMATS, policy.between.name: policy.between}
        self.parameters = set(parameters)

    def _add(self, graph: Graph, types: Mapping[str, str]) -> None:
        """A graph's nodes, each behind those of its bodies."""
        found = graph.types(types)
        self.types.update(found)
        self.users.update(graph.consumers())
        for node in graph.nodes():
            for number, body in enumerate(node.subgraphs):
                self._add_body(node, number, body, found)
            if not node.is_variable:
                self.nodes[node.name] = node
                self.alike.setdefault(node.name, []).append(node)

    def _add_body(self, node: Node, number: int, body: Graph,
                  types: Mapping[Entry, Optional[str]]) -> None:
        """A loop's or a condition's body."""
        variables = [n for n in body.nodes() if n.is_variable]
        read = [node.inputs[i] for i in bindings(node)[number]]
        self._add(body, {v.name: types[e] or "float32" for v, e in zip(variables, read)})
        self.outside.update(zip(variables, read))
        for variable, entry in zip(variables, read):
            self.inside.setdefault((node, entry), []).append(variable)
        if number == 0 and node.op in ("_while_loop", "_cond"):
            return  # it only tells whether to go on, or where
        for i, output in enumerate(body.outputs):
            self.given.setdefault(output, []).append(Entry(node, i))
        states = state_variables(node)
        carried = body.outputs[len(body.outputs) - len(states):]
        self.carried.update((variables[i], e) for i, e in zip(states, carried))

    def _format(self, entry: Entry) -> Optional[Format]:
        return self.formats.get(self.types.get(entry) or "")

    def tensors(self) -> List[Tensor]:
        """All that may be watched. Nodes of one name are counted as one."""
        made: Dict[Key, Tensor] = {}
        for nodes in self.alike.values():
            for tensor in (t for node in nodes for t in self._tensors_of(node)):
                made.setdefault(tensor.key, tensor).join(tensor)
        return list(made.values())

    def _tensors_of(self, node: Node) -> Iterator[Tensor]:
        if node.subgraphs:
            return
        last, name = 2 * len(self.nodes), node.name
        outputs = [e for e in self.users if e.node is node]
        gradients = {e: self._gradients(e) for e in outputs}
        variables = [variable for e in node.inputs for variable in self._variable(e)]
        for entry in outputs:
            format_ = self._format(entry)
            if format_ is not None:
                reads = [made for e in node.inputs for made in self.source(e)]
                carried = [made for e in node.inputs for made in self._carried(e)]
                yield Tensor(Key(name, False, entry.output), "output", node.op, self.order[name],
                             format_, reads, carried, gradients[entry], variables=variables)
        for i, entry in enumerate(node.inputs):
            format_ = self._format(entry)
            if format_ is None:
                continue
            weight = self.root(entry).node.name in self.parameters
            above = [key for e in outputs for key in gradients[e]]
            yield Tensor(Key(name, True, i), "weight gradient" if weight else "gradient",
                         node.op, last - self.order[name], format_, above, variables=variables)

    def _gradients(self, entry: Entry) -> List[Key]:
        """The gradients of all inputs that read an entry."""
        return [Key(user.name, True, k) for user in self._readers(entry)
                for k, read in enumerate(user.inputs)
                if set(self.source(read)) & set(self.source(entry))]

    def _readers(self, entry: Entry) -> List[Node]:
        """The nodes that read an entry, in bodies, too; behind those that are not watched, their
        readers."""
        found: List[Node] = []
        for user in self.users.get(entry, []):
            if user is None:  # an output of the graph, or of a body
                behind = self.given.get(entry, [])
            elif user.subgraphs:
                behind = [Entry(variable) for variable in self.inside.get((user, entry), [])]
            elif user.op in LEFT_ALONE:
                behind = [Entry(user)]
            else:
                found.append(user)
                continue
            found += [reader for one in behind for reader in self._readers(one)]
        return list(dict.fromkeys(found))

    def source(self, entry: Entry) -> List[Key]:
        """The tensor that an entry is: an output, but for nodes that are not watched. Of a
        condition it may be that of either branch."""
        node = entry.node
        if node.subgraphs:
            bodies = node.subgraphs[1:] if node.op == "_cond" else node.subgraphs[-1:]
            return [key for body in bodies for key in self.source(body.outputs[entry.output])]
        if node in self.outside:
            return self.source(self.outside[node])
        if node.op in LEFT_ALONE and node.inputs:
            return self.source(node.inputs[0])
        return [] if node.is_variable else [Key(node.name, False, entry.output)]

    def _variable(self, entry: Entry) -> List[str]:
        """The name of the variable that an entry is, if it is one."""
        node = entry.node
        if node in self.outside:
            return self._variable(self.outside[node])
        if node.op in LEFT_ALONE and node.inputs and not node.subgraphs:
            return self._variable(node.inputs[0])
        return [node.name] if node.is_variable else []

    def _carried(self, entry: Entry) -> List[Key]:
        """In a loop, the tensor that an entry is of the round before."""
        while entry.node.op in LEFT_ALONE and entry.node.inputs and not entry.node.subgraphs:
            entry = entry.node.inputs[0]
        return self.source(self.carried[entry.node]) if entry.node in self.carried else []

    def root(self, entry: Entry) -> Entry:
        """An entry without the casts behind it."""
        while entry.node.op in CASTS:
            entry = entry.node.inputs[0]
        return entry

    def is_output(self, key: Key) -> bool:
        """Whether a tensor is an output of its graph."""
        return any(None in self.users.get(Entry(node, key.which), []) for node in
                   self.alike[key.node])

    def kept_for(self, key: Key) -> List[str]:
        """The nodes that are to stay float32 so that this tensor is float32."""
        nodes: List[Node] = []
        for node in self.alike[key.node]:
            if key.backward:
                maker = self.root(node.inputs[key.which]).node
                nodes += [node] if maker.is_variable else [node, maker]
            else:
                nodes.append(node)
        return list(dict.fromkeys(n.name for one in nodes for n in self._but_casts(one)))

    def _but_casts(self, node: Node) -> List[Node]:
        """A node; of a cast, what reads it, or what runs in float32 and is cast back."""
        if node.op not in CASTS:
            return [node]
        maker = node.inputs[0].node
        if maker.op in CAST_BACK:
            return [maker]
        return [n for reader in self._readers(Entry(node)) for n in self._but_casts(reader)]

    def blamed(self, key: Key) -> str:
        """The node that a tensor is laid to: of a cast, what it casts; of a cast's gradient, the
        node that has made it."""
        node = self.nodes[key.node]
        if node.op not in CASTS:
            return key.node
        maker = self.root(Entry(node)).node
        readers = [n.name for n in self._readers(Entry(node)) if n.op not in CASTS]
        if maker.is_variable or key.backward and readers and maker.op not in CAST_BACK:
            return readers[0] if readers else key.node
        return str(maker.name)


def counted_reads(tensors: Iterable[Tensor], counted: Container[Key]) -> Dict[Key, List[Key]]:
    """What each tensor is computed from, of what was counted. What was not, such as the gradients
    of a sum, which are its own, stands for what it is computed from itself."""
    found: Dict[Key, List[Key]] = {}
    for tensor in sorted(tensors, key=lambda t: t.place):
        found[tensor.key] = list(dict.fromkeys(
            key for read in tensor.reads
            for key in ([read] if read in counted else found.get(read, []))))
    return found


def fill(tensors: List[Tensor], steps: Sequence[Tuple[float, Any]], scale: float) -> None:
    """Gives the tensors what steps, each at its loss scale, have counted: gradients as they would
    be at this scale. No scale reaches what a loss begins with by itself."""
    begin = {t.key for t in tensors if _begins(t)}
    total: Mapping[Key, Counts] = {}
    if steps:
        total = added_up([(scale / at, counted) for at, counted in steps], begin)
    for tensor in tensors:
        tensor.counts = total.get(tensor.key)


def compare(tensors: List[Tensor], found: Counted, right: Counted) -> None:
    """Notes how far a step is from the same one in float32."""
    pairs = [(tensor, right.sample(tensor.key), found.sample(tensor.key)) for tensor in tensors
             if not _begins(tensor)]
    pairs = [one for one in pairs if 0 < len(one[1]) == len(one[2])]
    for (tensor, _, _), (largest, now) in zip(pairs, compared([one for _, one, _ in pairs],
                                                              [one for _, _, one in pairs])):
        tensor.beyond |= largest > tensor.format.largest
        if now == now:  # not NaN
            tensor.snr = now if tensor.snr is None else min(tensor.snr, now)


def _begins(tensor: Tensor) -> bool:
    """Whether it is the gradient that a loss begins with."""
    return tensor.key.backward and tensor.op in LOSSES
