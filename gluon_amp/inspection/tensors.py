"""The nodes and tensors of a converted network in order of computation, with their statistics."""
import math
import statistics
from dataclasses import dataclass, field
from typing import Any, Collection, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

from .._mxnet import np
from ..formats import FLOAT32, FORMATS, Format
from ..graph import operators
from ..graph.build import LEFT_ALONE
from ..graph.graph import CASTS, Entry, Graph, Node, state_variables
from ..graph.operators import LOSSES, PRODUCTS
from ..policy import Policy
from .statistics import Counted, Key, compared

_BELOW_ROUNDING, _LEAST_DECIBELS = 26, 10.0  # thresholds of `low_snr` in dB

# Operators whose gradients are copies of the output's gradient; these are not counted.
_HANDS_ON = frozenset(["elemwise_add"])
_ENDS_GRADIENTS = frozenset(["BlockGrad", "zeros_like", "ones_like"])

# Operators that return their first input's values, or a part of them, in another order.
_COPIES = frozenset("""Concat Crop Pad SwapAxis reverse slice slice_axis slice_like stack tile
    transpose _np_moveaxis _np_transpose _npi_concatenate _npi_stack""".split())

Found = List[Entry]  # the sources of an entry: one output or variable; two for a condition


@dataclass
class Tensor:
    """A tensor with its statistics.

    Attributes:
        key: its node's name, whether it is a gradient, and the index of the output or input.
        kind: "output", "gradient", or "weight gradient".
        op: the operator that computes it.
        place: its index in order of computation, forward before backward.
        format: its format.
        reads: keys of its inputs.
        carried: keys of its inputs from a loop's previous iteration.
        gradients: for an output, keys of the tensors that sum to its gradient.
        variables: names of the data and parameters that its node reads.
        parameter: for a weight gradient, the parameter's name.
        counts: the counts of all steps; None before.
        snr: the SNR against float32 in dB, the lowest of all steps; None without a reference.
        beyond: whether the float32 step has values beyond its format.
        worths: for each step, the share by which its rounding moves the loss; see `weigh`.
        by_chance: for products, the same if errors and gradients are uncorrelated.
        largest: for each step, the exponent of its largest value; see `note_largest`.
        peak: a value that the tensor reaches, if its exponent is the format's last; else 0.
    """
    key: Key
    kind: str
    op: str
    place: int
    format: Format
    reads: List[Key] = field(repr=False, default_factory=list)
    carried: List[Key] = field(repr=False, default_factory=list)
    gradients: List[Key] = field(repr=False, default_factory=list)
    variables: List[str] = field(repr=False, default_factory=list)
    parameter: str = field(repr=False, default="")
    counts: Any = field(repr=False, default=None)
    snr: Optional[float] = None
    beyond: bool = False
    worths: List[float] = field(repr=False, default_factory=list)
    by_chance: List[float] = field(repr=False, default_factory=list)
    largest: List[int] = field(repr=False, default_factory=list)
    peak: float = 0.0

    @property
    def name(self) -> str:
        """The name in reports: conv0_fwd, gradient of conv0_weight, gradient of relu0_fwd input 0.
        """
        if not self.key.backward:
            return self.key.node + (f"[{self.key.which}]" if self.key.which else "")
        return f"gradient of {self.parameter or f'{self.key.node} input {self.key.which}'}"

    def join(self, other: "Tensor") -> None:
        """Adds the inputs and readers of another tensor with the same key."""
        for name in ("reads", "carried", "gradients", "variables"):
            setattr(self, name, list(dict.fromkeys(getattr(self, name) + getattr(other, name))))
        self.format = other.format if other.is_low else self.format

    @property
    def is_low(self) -> bool:
        """Whether its format is not float32."""
        return self.format != FLOAT32

    @property
    def begins(self) -> bool:
        """Whether it is a gradient that a loss operator starts without the loss scale."""
        return self.key.backward and self.op in LOSSES

    @property
    def low_snr(self) -> float:
        """The SNR in dB below which the format does not suit the tensor."""
        exact = 6.02 * (self.format.fraction + 1)  # the SNR of rounding without underflow
        return max(exact - _BELOW_ROUNDING, _LEAST_DECIBELS)

    @property
    def last_exponent(self) -> int:
        """The exponent of its format's largest number."""
        return math.floor(math.log2(self.format.largest))


class Layout:
    """The nodes of graphs in order, and their tensors.

    The bodies of loops and conditions are inlined. Operators that only copy values (LEFT_ALONE) are
    not counted, and are replaced by their inputs.

    Args:
        graphs: graphs with casts in execution order, and the types of their variables.
        policy: the policy.
        parameters: the names of parameters.
        keep: names of nodes that stay float32.
        data: the names of the network's data.
    """

    def __init__(self, graphs: Collection[Tuple[Graph, Mapping[str, str]]], policy: Policy,
                 parameters: Collection[str], keep: Collection[str] = (),
                 data: Collection[str] = ()) -> None:
        self.nodes: Dict[str, Node] = {}
        self.keep, self.data = keep, data
        self.formats = {**FORMATS, policy.between.name: policy.between}
        self.parameters = set(parameters)
        self._alike: Dict[str, List[Node]] = {}  # nodes by name; a block may be called repeatedly
        self._types: Dict[Entry, Optional[str]] = {}
        self._made: Dict[Node, List[Entry]] = {}
        self._reads: Dict[Node, List[Found]] = {}
        self._readers: Dict[Entry, List[Tuple[Node, int]]] = {}
        self._read: Set[Entry] = set()  # entries with a reader
        self._outputs: Set[Entry] = set()  # outputs of the graphs
        # the sources of a loop's state in the first iteration, and in later ones
        self._first: Dict[Entry, Found] = {}
        self._carried: Dict[Entry, Found] = {}
        for graph, types in graphs:
            self._outputs.update(e for found in self._add(graph, types, {}) for e in found)
        self.order = {name: i for i, name in enumerate(self.nodes)}
        # for each output, the tensors that sum to its gradient
        self._gradients: Dict[Entry, List[Key]] = {}
        for node in reversed(self._reads):
            self._gradients.update((e, self._gradients_of(e)) for e in self._made[node])

    def _add(self, graph: Graph, types: Mapping[str, str], outside: Mapping[str, Found],
             states: Collection[Node] = ()) -> List[Found]:
        """Adds a graph or a body. Returns the sources of its outputs.

        `outside` has the sources of its variables.
        """
        inferred = graph.types(types)
        self._types.update(inferred)
        self._read.update(graph.consumers())
        for entry in inferred:
            self._made.setdefault(entry.node, []).append(entry)
        found: Dict[Entry, Found] = {}
        for node in graph.nodes():
            entry = Entry(node)
            if node.is_variable:
                found[entry] = outside.get(node.name, [entry])
                if node in states:
                    self._first[entry], found[entry] = found[entry], [entry]
                continue
            reads = [found[e] for e in node.inputs]
            if node.subgraphs:
                made = self._add_bodies(node, inferred, found)
                found.update((Entry(node, i), one) for i, one in enumerate(made))
            elif node.op in LEFT_ALONE and reads:
                found[entry] = reads[0]
            else:
                found.update((e, [e]) for e in self._made[node])
                self._reads[node] = reads
                for i, one in enumerate(reads):
                    for e in self._at_first(one):
                        self._readers.setdefault(e, []).append((node, i))
            self.nodes[node.name] = node
            self._alike.setdefault(node.name, []).append(node)
        return [found[e] for e in graph.outputs]

    def _add_bodies(self, node: Node, types: Mapping[Entry, Optional[str]],
                    found: Mapping[Entry, Found]) -> List[Found]:
        made = []
        for body in node.bodies(types):
            outside = {name: found[e] for name, e in body.outside.items()}
            numbers = state_variables(node) if body.graph is node.subgraphs[-1] else []
            variables = [n for n in body.graph.nodes() if n.is_variable]
            states = [variables[i] for i in numbers]
            made.append(self._add(body.graph, body.types, outside, states))
            self._carried.update(zip(map(Entry, states), made[-1][len(made[-1]) - len(states):]))
        if node.op != "_cond":
            return made[-1]
        return [then + otherwise for then, otherwise in zip(*made[1:])]

    def tensors(self) -> List[Tensor]:
        """Returns all tensors that may be counted. Nodes with the same name count as one."""
        made: Dict[Key, Tensor] = {}
        for nodes in self._alike.values():
            for tensor in (t for node in nodes for t in self._tensors_of(node)):
                made.setdefault(tensor.key, tensor).join(tensor)
        return list(made.values())

    def _tensors_of(self, node: Node) -> Iterator[Tensor]:
        if node not in self._reads:
            return
        name, place = node.name, self.order[node.name]
        outputs = [e for e in self._made[node] if e in self._read]
        reads = [e for one in self._reads[node] for e in one]
        variables = [e.node.name for e in self._at_first(reads) if e.node.is_variable]
        before, carried = ([Key(e.node.name, False, e.output) for e in self._at_first(some)
                            if not e.node.is_variable] for some in (
            reads, [e for one in reads for e in self._carried.get(one, [])]))
        for entry in outputs:
            format_ = self.formats.get(self._types[entry] or "")
            if format_ is not None:
                yield Tensor(Key(name, False, entry.output), "output", node.op, place, format_,
                             before, carried, self._gradients[entry], variables)
        above = [key for e in outputs for key in self._gradients[e]]
        for i, entry in enumerate(node.inputs):
            format_ = self.formats.get(self._types[entry] or "")
            if format_ is not None:
                read = self.maker(node, i).node.name
                weight = read in self.parameters
                yield Tensor(Key(name, True, i), "weight gradient" if weight else "gradient",
                             node.op, 2 * len(self.nodes) - place, format_, above,
                             variables=variables, parameter=read if weight else "")

    def _gradients_of(self, entry: Entry) -> List[Key]:
        found: Dict[Key, None] = {}
        for reader, which in self._readers.get(entry, ()):
            read = reader.inputs[which].node
            while read.op in LEFT_ALONE and read.op not in _ENDS_GRADIENTS and read.inputs:
                read = read.inputs[0].node
            if read.op in _ENDS_GRADIENTS:
                continue
            found.update(dict.fromkeys(self._gradients[Entry(reader)] if reader.op in _HANDS_ON
                                       else [Key(reader.name, True, which)]))
        return list(found)

    def _at_first(self, found: Found) -> Found:
        """Returns the sources in the first iteration of loops."""
        return [one for e in found
                for one in (self._at_first(self._first[e]) if e in self._first else [e])]

    def maker(self, node: Node, which: int) -> Entry:
        """Returns the source of a node's input before casts; the variable for a loop's state."""
        entry = self._reads[node][which][0]
        while entry.node.op in CASTS:
            entry = self._reads[entry.node][0][0]
        return entry

    def makers(self, name: str) -> List[Entry]:
        """Returns the same for all inputs of a node."""
        node = self.nodes[name]
        return [self.maker(node, i) for i, _ in enumerate(self._reads.get(node, ()))]

    def data_of(self, key: Key) -> str:
        """Returns the name of the data that a tensor casts, or copies and casts; else ""."""
        node = self.nodes[key.node]
        if key.backward or node.op not in CASTS:
            return ""
        while node.op in CASTS or node.op in _COPIES:
            node = self.maker(node, 0).node
        return node.name if node.name in self.data else ""

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


def counted_reads(tensors: Iterable[Tensor], counted: Collection[Key]) -> Dict[Key, List[Key]]:
    """Returns the counted inputs of each tensor. Tensors that were not counted, such as the
    gradients of a sum, are replaced by their inputs."""
    found: Dict[Key, List[Key]] = {}
    for tensor in sorted(tensors, key=lambda t: t.place):
        found[tensor.key] = list(dict.fromkeys(
            key for read in tensor.reads
            for key in ([read] if read in counted else found.get(read, []))))
    return found


# ---- what a step shows --------------------------------------------------------------------------


def compare(tensors: Iterable[Tensor], found: Counted, right: Counted, factor: float) -> None:
    """Updates the tensors' SNR of a step against the same step in float32, whose gradients are
    multiplied by a factor."""
    with np.errstate(over="ignore"):  # rounds that a while_loop does not run leave undefined values
        pairs = [(tensor, right.sample(tensor.key) * np.float32(
                      factor if tensor.key.backward else 1), found.sample(tensor.key))
                 for tensor in tensors if not tensor.begins]
    pairs = [one for one in pairs if 0 < len(one[1]) == len(one[2])]
    for (tensor, _, _), (largest, now) in zip(pairs, compared([one for _, one, _ in pairs],
                                                              [one for _, _, one in pairs])):
        tensor.beyond |= largest > tensor.format.largest
        if now == now:  # not NaN
            tensor.snr = now if tensor.snr is None else min(tensor.snr, now)


def weigh(tensors: Iterable[Tensor], counted: Counted, total: float, scale: float) -> None:
    """Adds to each rounded forward tensor with a sample the share by which it moves the loss.

    To first order, the loss moves by the sum of each value's error times its gradient. Rounding
    errors are independent, so their squares add up; histograms have the squares of errors and of
    gradients. Samples correct for their correlation: the values of a mask have large errors, and
    their gradients are 0. `by_chance` has no such correction.
    """
    tensors = list(tensors)
    begin = {t.key for t in tensors if t.begins}
    squares = [s / (1.0 if key in begin else scale) ** 2
               for key, s in zip(counted, counted.all.squares.tolist())]
    errors, numbers = counted.all.error_squares.tolist(), counted.numbers().tolist()
    for tensor in tensors:
        row = counted.rows.get(tensor.key)
        if tensor.key.backward or not tensor.is_low or row is None or not total \
                or not len(counted.samples[row]):
            continue
        gradients = [counted.rows[key] for key in tensor.gradients if key in counted.rows]
        # the expected square of the sum of errors times gradients
        expected = errors[row] * sum(squares[g] for g in gradients) / max(numbers[row], 1)
        moved = math.sqrt(expected) / total
        if not math.isfinite(moved):
            continue
        if tensor.op in PRODUCTS:
            tensor.by_chance.append(moved)
        # half of the threshold of a finding; less needs no correction
        if moved > 2.0 ** -(tensor.format.fraction + 2):
            moved *= math.sqrt(min(_meet(tensor.format, counted.samples[row],
                                         [counted.samples[g] for g in gradients]), 1.0))
        tensor.worths.append(moved)


def _meet(format_: Format, sample: Any, gradients: List[Any]) -> float:
    """Returns the correlation of squared errors and gradients in samples; 1 if they are
    independent."""
    size = np.abs(sample.astype(np.float64))
    squares = sum(np.square(g.astype(np.float64)) for g in gradients if len(g) == len(size))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.square(np.maximum(np.ldexp(1.0, np.frexp(size)[1] - 1 - format_.fraction),
                                      format_.smallest)) * (size > 0)
        known = np.isfinite(size) & np.isfinite(squares)
        both = np.sum(errors * known) * np.sum(squares * known)
    return float(known.sum() * np.sum(np.where(known, errors * squares, 0.0)) / both) \
        if both > 0 and math.isfinite(both) else 1.0


_BITS = 4  # bits below a format's largest exponent; smaller values are ignored


def note_largest(tensors: Iterable[Tensor], counts: Counted) -> None:
    """Adds the exponent of a step's largest value to each forward tensor of a format with
    infinities. Values without gradients, such as those of a mask, are ignored."""
    highest = counts.highest().tolist()
    for tensor in tensors:
        row, format_ = counts.rows.get(tensor.key), tensor.format
        if tensor.key.backward or row is None or not tensor.is_low \
                or format_.saturate or not format_.infinities:
            continue
        least = tensor.last_exponent - _BITS
        if highest[row] <= least:
            tensor.largest.append(least)
        elif not _is_masked(tensor, counts, 2.0 ** least):
            tensor.largest.append(highest[row])
            if highest[row] == tensor.last_exponent:
                sampled = np.abs(counts.sample(tensor.key)).max(initial=0.0)
                tensor.peak = max(tensor.peak, 2.0 ** tensor.last_exponent, float(sampled))


def _is_masked(tensor: Tensor, counts: Counted, least: float) -> bool:
    """Whether the sample has values of at least `least`, all without gradients."""
    large = np.abs(counts.sample(tensor.key)) >= least
    gradients = [counts.sample(key) for key in tensor.gradients if key in counts]
    return bool(large.any()) and bool(gradients) and not any(
        len(g) == len(large) and g[large].any() for g in gradients)


def varies_by(tensor: Tensor) -> Optional[int]:
    """Returns the max exponent minus the median exponent over batches, if it exceeds the headroom:
    another batch may overflow."""
    if len(tensor.largest) < 2:
        return None
    most = max(tensor.largest)
    by = most - statistics.median_low(tensor.largest)
    return by if tensor.last_exponent - most < by else None
