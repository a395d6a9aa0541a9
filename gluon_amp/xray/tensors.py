"""Which tensors a converted network's graph has, in order of computation."""
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ..formats import FLOAT32, FORMATS, Format
from ..graph.build import LEFT_ALONE
from ..graph.graph import CASTS, Entry, Graph, Node
from ..policy import Policy
from .statistics import Counts, Key, snr


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
        counts: what was counted, over all steps.
        snr: against the float32 step, in dB, the worst of the steps; None without a reference.
    """
    key: Key
    kind: str
    op: str
    place: int
    format: Format
    reads: List[Key] = field(repr=False, default_factory=list)
    counts: Optional[Counts] = field(repr=False, default=None)
    snr: Optional[float] = None

    @property
    def name(self) -> str:
        """For people: conv0_fwd, or "gradient of conv0_fwd's input 0"."""
        if not self.key.backward:
            return self.key.node + (f"[{self.key.which}]" if self.key.which else "")
        return f"gradient of {self.key.node}'s input {self.key.which}"

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
                 parameters: Any) -> None:
        self.nodes: Dict[str, Node] = {}
        self.users: Dict[Entry, List[Optional[Node]]] = {}
        self.types: Dict[Entry, Optional[str]] = {}
        for graph, types in graphs:
            self.nodes.update((n.name, n) for n in graph.nodes() if not n.is_variable)
            self.users.update(graph.consumers())
            self.types.update(graph.types(types))
        self.order = {name: i for i, name in enumerate(self.nodes)}
        self.formats = {**FORMATS, policy.between.name: policy.between}
        self.parameters = set(parameters)

    def _format(self, entry: Entry) -> Optional[Format]:
        return self.formats.get(self.types.get(entry) or "")

    def tensors(self) -> Iterator[Tensor]:
        """All that may be watched."""
        last = 2 * len(self.nodes)
        for name, node in self.nodes.items():
            outputs = [e for e in self.users if e.node is node]
            for entry in outputs:
                format_ = self._format(entry)
                if format_ is not None:
                    reads = [made for e in node.inputs for made in self.source(e)]
                    yield Tensor(Key(name, False, entry.output), "output", node.op,
                                 self.order[name], format_, reads)
            for i, entry in enumerate(node.inputs):
                format_ = self._format(entry)
                if format_ is None:
                    continue
                weight = self.root(entry).node.name in self.parameters
                above = [Key(user.name, True, k) for e in outputs for user in self._readers(e)
                         for k, read in enumerate(user.inputs)
                         if self.source(read) == self.source(e)]
                yield Tensor(Key(name, True, i), "weight gradient" if weight else "gradient",
                             node.op, last - self.order[name], format_, above)

    def _readers(self, entry: Entry) -> List[Node]:
        """The nodes that read an entry; behind those that are not watched, their readers."""
        found: List[Node] = []
        for user in self.users.get(entry, []):
            if user is not None and user.op in LEFT_ALONE:
                found += self._readers(Entry(user))
            elif user is not None:
                found.append(user)
        return found

    def source(self, entry: Entry) -> List[Key]:
        """The tensor that an entry is: an output, but for nodes that are not watched."""
        while entry.node.op in LEFT_ALONE and entry.node.inputs:
            entry = entry.node.inputs[0]
        return [] if entry.node.is_variable else [Key(entry.node.name, False, entry.output)]

    def root(self, entry: Entry) -> Entry:
        """An entry without the casts behind it."""
        while entry.node.op in CASTS:
            entry = entry.node.inputs[0]
        return entry

    def kept_for(self, key: Key) -> List[str]:
        """The nodes that are to stay float32 so that this tensor is float32."""
        node = self.nodes[key.node]
        if key.backward:
            maker = self.root(node.inputs[key.which]).node
            nodes = [node] if maker.is_variable else [node, maker]
        elif node.op in CASTS:  # what reads it
            nodes = self._readers(Entry(node))
        else:
            nodes = [node]
        found: List[str] = []
        for one in nodes:
            behind = self._readers(Entry(one)) if one.op in CASTS else [one]
            found += [n.name for n in behind]
        return list(dict.fromkeys(found))

    def blamed(self, key: Key) -> str:
        """The node that a tensor is laid to: of a cast, what it casts."""
        node = self.nodes[key.node]
        if node.op not in CASTS or key.backward:
            return key.node
        maker = self.root(Entry(node)).node
        if not maker.is_variable:
            return maker.name
        readers = self._readers(Entry(node))
        return readers[0].name if readers else key.node


def fill(tensors: List[Tensor], counts: Mapping[Key, Counts],
         reference: Optional[Mapping[Key, Counts]], factor: float = 1.0) -> None:
    """Adds what a step has counted to the tensors; gradients multiplied by a power of two."""
    for tensor in tensors:
        found = counts.get(tensor.key)
        if found is None:
            continue
        added = found.times(factor) if tensor.key.backward else found
        tensor.counts = added if tensor.counts is None else tensor.counts + added
        right = (reference or {}).get(tensor.key)
        if right is not None and right.sample is not None:
            now = snr(right.sample, found.sample)
            if now == now:  # not NaN
                tensor.snr = now if tensor.snr is None else min(tensor.snr, now)

