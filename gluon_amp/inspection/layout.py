"""The nodes and tensors of a converted network, in order of computation."""
from functools import cached_property
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from ..formats import FORMATS
from ..graph import operators
from ..graph.graph import Entry, Graph, Node, state_variables
from ..graph.operators import CASTS, COLUMNS, PRODUCTS, STOPS, family
from .tensors import Counts, Key, Tensor

Sources = List[Entry]  # the sources of an entry: one output or variable; two for a condition


class Layout:
    """The nodes of graphs in order, and their tensors.

    The bodies of loops and conditions are inlined. Operators that only copy values are not
    counted, and are replaced by their inputs.

    Attributes:
        nodes: the nodes by name.
        tensors: the tensors that may be counted.

    Args:
        graphs: graphs with casts in execution order, and the types of their variables.
        parameters: the names of parameters.
        keep: names of nodes that stay float32.
        data: the names of the network's data.
    """

    def __init__(self, graphs: Collection[Tuple[Graph, Mapping[str, str]]],
                 parameters: Collection[str], keep: Collection[str],
                 data: Collection[str]) -> None:
        self.keep, self.data = keep, data
        self.parameters = set(parameters)
        self._alike: Dict[str, List[Node]] = {}  # nodes by name; a block may be called repeatedly
        self._types: Dict[Entry, Optional[str]] = {}
        self._outputs_of: Dict[Node, List[Entry]] = {}
        self._reads: Dict[Node, List[Sources]] = {}
        self._readers: Dict[Entry, List[Tuple[Node, int]]] = {}
        self._read: Set[Entry] = set()  # entries with a reader
        self._outputs: Set[Entry] = set()  # outputs of the graphs
        # the sources of a loop's state in the first iteration, and in later ones
        self._first: Dict[Entry, Sources] = {}
        self._carried: Dict[Entry, Sources] = {}
        for graph, types in graphs:
            self._outputs.update(e for entries in self._add(graph, types, {}) for e in entries)
        self.nodes = {name: alike[-1] for name, alike in self._alike.items()}
        # for each output, the tensors that sum to its gradient
        self._gradients: Dict[Entry, List[Key]] = {}
        for node in reversed(self._reads):
            self._gradients.update((e, self._gradients_of(e)) for e in self._outputs_of[node])
        self.tensors = self._find_tensors()

    def _add(self, graph: Graph, types: Mapping[str, str], outside: Mapping[str, Sources],
             states: Collection[Node] = ()) -> List[Sources]:
        """Adds a graph or a body. Returns the sources of its outputs.

        `outside` has the sources of its variables.
        """
        inferred = graph.types(types)
        self._types.update(inferred)
        self._read.update(graph.consumers())
        for entry in inferred:
            self._outputs_of.setdefault(entry.node, []).append(entry)
        sources: Dict[Entry, Sources] = {}
        nodes = graph.nodes()
        variables = {node for node in nodes if node.is_variable}
        for node in nodes:
            entry = Entry(node)
            if node in variables:
                sources[entry] = outside.get(node.name, [entry])
                if node in states:
                    self._first[entry], sources[entry] = sources[entry], [entry]
                continue
            reads = [sources[e] for e in node.inputs]
            if node.subgraphs:
                outputs = self._add_bodies(node, inferred, sources)
                sources.update((Entry(node, i), source) for i, source in enumerate(outputs))
            elif node.op in COLUMNS["moves"] and reads:
                sources[entry] = reads[0]
            else:
                sources.update((e, [e]) for e in self._outputs_of[node])
                self._reads[node] = reads
                for i, source in enumerate(reads):
                    for e in self._at_first(source):
                        self._readers.setdefault(e, []).append((node, i))
            self._alike.setdefault(node.name, []).append(node)
        return [sources[e] for e in graph.outputs]

    def _add_bodies(self, node: Node, types: Mapping[Entry, Optional[str]],
                    sources: Mapping[Entry, Sources]) -> List[Sources]:
        outputs = []
        for body in node.bodies(types):
            outside = {name: sources[e] for name, e in body.outside.items()}
            numbers = state_variables(node) if body.graph is node.subgraphs[-1] else []
            variables = [n for n in body.graph.nodes() if n.is_variable]
            states = [variables[i] for i in numbers]
            outputs.append(self._add(body.graph, body.types, outside, states))
            last = outputs[-1]
            self._carried.update(zip(map(Entry, states), last[len(last) - len(states):]))
        if node.op != "_cond":
            return outputs[-1]
        return [then + otherwise for then, otherwise in zip(*outputs[1:])]

    def _find_tensors(self) -> List[Tensor]:
        """Returns all tensors that may be counted. Nodes with the same name count as one."""
        tensors: Dict[Key, Tensor] = {}
        for place, nodes in enumerate(self._alike.values()):
            for tensor in (t for node in nodes if node in self._reads
                           for t in self._tensors_of(node, place)):
                if tensors.setdefault(tensor.key, tensor) is not tensor:
                    tensors[tensor.key].join(tensor)
        return list(tensors.values())

    def _tensors_of(self, node: Node, place: int) -> List[Tensor]:
        name = node.name
        formats = {e: FORMATS[self._types[e] or ""] for e in [*self._outputs_of[node], *node.inputs]
                   if self._types[e] in FORMATS}
        outputs = [e for e in self._outputs_of[node] if e in self._read]
        reads = [e for of_input in self._reads[node] for e in of_input]
        variables = [e.node.name for e in self._at_first(reads) if e.node.is_variable]
        before, carried = ([Key(e.node.name, False, e.output) for e in self._at_first(some)
                            if not e.node.is_variable] for some in (
            reads, [e for of_input in reads for e in self._carried.get(of_input, [])]))
        above = [key for e in outputs for key in self._gradients[e]]
        makers = [self.maker(node, i).node.name for i in range(len(node.inputs))]
        weights = [maker if maker in self.parameters else "" for maker in makers]
        return [Tensor(Key(name, False, entry.output), "output", node.op, place, formats[entry],
                       before, carried, self._gradients[entry], variables)
                for entry in outputs if entry in formats] + [
            Tensor(Key(name, True, i), "weight gradient" if weight else "gradient", node.op,
                   2 * len(self.nodes) - place, formats[entry], above, variables=variables,
                   parameter=weight)
            for i, (entry, weight) in enumerate(zip(node.inputs, weights)) if entry in formats]

    def _gradients_of(self, entry: Entry) -> List[Key]:
        keys: Dict[Key, None] = {}
        for reader, which in self._readers.get(entry, ()):
            read = reader.inputs[which].node
            while read.op in COLUMNS["moves"] and read.op not in STOPS and read.inputs:
                read = read.inputs[0].node
            if read.op in STOPS:
                continue
            hands_on = reader.op in COLUMNS["hands_on"]
            keys.update(dict.fromkeys(self._gradients[Entry(reader)] if hands_on
                                       else [Key(reader.name, True, which)]))
        return list(keys)

    def _at_first(self, entries: Sources) -> Sources:
        """Returns the sources in the first iteration of loops."""
        return [one for e in entries
                for one in (self._at_first(self._first[e]) if e in self._first else [e])]

    def maker(self, node: Node, which: int) -> Entry:
        """Returns the source of a node's input before casts; the variable for a loop's state."""
        entry = self._reads[node][which][0]
        while entry.node.op in CASTS:
            entry = self._reads[entry.node][0][0]
        return entry

    def parameter_of(self, key: Key) -> str:
        """Returns the name of the parameter that a tensor casts; else ""."""
        if key.backward or self.nodes[key.node].op not in CASTS:
            return ""
        name = self.maker(self.nodes[key.node], 0).node.name
        return name if name in self.parameters else ""

    def data_of(self, key: Key) -> str:
        """Returns the name of the data that a tensor casts, or copies and casts; else ""."""
        node = self.nodes[key.node]
        if key.backward or node.op not in CASTS:
            return ""
        while node.op in family("cast", "rearrangement"):
            node = self.maker(node, 0).node
        return node.name if node.name in self.data else ""

    def readers_of(self, variable: str) -> List[Node]:
        """Returns the operators that read a variable, behind casts."""
        left = [e for e in self._readers if e.node.is_variable and e.node.name == variable]
        readers: Dict[Node, None] = {}
        for entry in left:
            for node, _ in self._readers.get(entry, ()):
                if node.op in CASTS:
                    left.append(Entry(node))
                else:
                    readers[node] = None
        return list(readers)

    def is_output(self, key: Key) -> bool:
        """Whether a tensor is an output of its graph."""
        return any(Entry(node, key.which) in self._outputs for node in self._alike[key.node])

    def kept_for(self, key: Key) -> List[str]:
        """Returns the nodes that must stay float32 so that this tensor is float32."""
        nodes: List[Node] = []
        for node in self._alike[key.node]:
            maker = self.maker(node, key.which).node if key.backward else node
            nodes += [node] if maker.is_variable or maker is node else [node, maker]
        return list(dict.fromkeys(n.name for one in nodes for n in self._but_casts(one)))

    def _but_casts(self, node: Node) -> List[Node]:
        """Returns a node, and for a cast its readers, or its input if that is cast back."""
        if node.op not in CASTS:
            return [node]
        for before in self._reads[node][0]:
            if self.is_cast_back(before.node):
                return [before.node]
        return [n for reader, _ in self._readers.get(Entry(node), ())
                for n in self._but_casts(reader)]

    def is_cast_back(self, node: Node) -> bool:
        """Whether a node computes in float32 and a cast rounds its result."""
        if node.name in self.keep or self._types[Entry(node)] != "float32":
            return False
        return node.op in PRODUCTS or operators.gives_back(node) \
            and node.inputs[0].node.op in CASTS

    def blamed(self, key: Key) -> str:
        """Returns the node that causes a tensor: for a cast its input, and for a cast's gradient
        the node that computes it."""
        node = self.nodes[key.node]
        if node.op not in CASTS:
            return key.node
        maker = self.maker(node, 0).node
        readers = [n.name for n, _ in self._readers.get(Entry(node), ()) if n.op not in CASTS]
        if maker.is_variable or key.backward and readers and not self.is_cast_back(maker):
            return readers[0] if readers else key.node
        return maker.name


class Flow:
    """The tensors that were counted, in order of computation, and which of them read which.

    Attributes:
        seen: the counted tensors.
        counts: their counts.
    """

    def __init__(self, tensors: Iterable[Tensor], counts: Mapping[Key, Counts]) -> None:
        self._tensors = sorted(tensors, key=lambda t: t.place)
        self.seen = {t.key: t for t in self._tensors if t.key in counts}
        self.counts = {key: counts[key] for key in self.seen}

    @cached_property
    def reads(self) -> Dict[Key, List[Key]]:
        """The counted inputs of each tensor. Tensors that were not counted, such as the gradients
        of a sum, are replaced by their inputs."""
        reads: Dict[Key, List[Key]] = {}
        for tensor in self._tensors:
            reads[tensor.key] = list(dict.fromkeys(
                key for read in tensor.reads
                for key in ([read] if read in self.seen else reads.get(read, []))))
        return reads

    @cached_property
    def readers(self) -> Dict[Key, List[Key]]:
        """The forward tensors that read each tensor."""
        readers: Dict[Key, List[Key]] = {}
        for key in self.seen:
            for read in self.reads[key] if not key.backward else ():
                readers.setdefault(read, []).append(key)
        return readers

    def before(self, tensor: Tensor) -> List[Tensor]:
        """Returns the inputs of a tensor's operator."""
        return [self.seen[key] for key in self.reads[tensor.key]]

    @cached_property
    def broken(self) -> List[Tensor]:
        """The tensors that are not finite.

        It leaves out infinities that did not overflow and that all readers turn into finite
        numbers, such as those of a softmax's mask.
        """
        tensors: Dict[Key, Tensor] = {}
        for key, tensor in reversed([*self.seen.items()]):
            held = self.counts[key]
            if held.stay_finite:
                continue
            behind = self.readers.get(key, [])
            if held.overflowed or held.nan or not behind or any(read in tensors for read in behind):
                tensors[key] = tensor
        return [*tensors.values()][::-1]

    @property
    def goes_forward(self) -> bool:
        """Whether the forward pass is finite."""
        return all(t.key.backward for t in self.broken)

    def beginnings(self, broken: Iterable[Tensor]) -> List[Tensor]:
        """Returns the tensors that are not finite and have no such input, in order.

        Counts cover all iterations, so loops and blocks that are called several times form cycles.
        Of a cycle, this returns the tensor that overflowed, and of several that with the fewest
        infinities.
        """
        def order(tensor: Tensor) -> Tuple[bool, float, int]:
            held = self.counts[tensor.key]
            return not held.overflowed, (held.infinite + held.nan) / held.numbers, tensor.place
        left = {t.key: t for t in sorted(broken, key=order)}
        before = {key: [k for k in self.reads[key] + t.carried if k in left]
                  for key, t in left.items()}
        behind: Dict[Key, List[Key]] = {key: [] for key in left}
        for key, inputs in before.items():
            for read in inputs:
                behind[read].append(key)
        first = [t for key, t in left.items() if not before[key]]
        follow = reached([t.key for t in first], behind)
        for key, tensor in left.items():
            if key in follow or not before[key]:
                continue
            round_ = reached([key], behind)
            if round_ >= reached([key], before):
                first.append(tensor)
                follow |= round_
        return sorted(first, key=lambda t: t.place)


def reached(keys: List[Key], ways: Mapping[Key, List[Key]],
            ends: Callable[[Key], Any] = lambda key: False) -> Set[Key]:
    """All that is reached from some keys, by one step or more, and not through where it ends."""
    visited: Set[Key] = set()
    left = list(keys)
    while left:
        new = [key for key in ways.get(left.pop(), ()) if key not in visited]
        visited.update(new)
        left += [key for key in new if not ends(key)]
    return visited
