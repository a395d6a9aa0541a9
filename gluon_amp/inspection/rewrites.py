"""Rewrites of a graph for an X-ray's trials: smaller numbers with the same result, epsilons.

`scaled` multiplies an input of an operator by a factor, and follows the factor through the graph: a
product hands it on, a square squares it, a softmax takes it into its temperature, a quotient of two
multiples has none. The new graph computes the same, except for a factor of its outputs.
"""
from fractions import Fraction
from typing import Dict, FrozenSet, List, NamedTuple, Optional, Tuple

from ..cpu import library
from ..graph.graph import Entry, Graph, Node
from ..graph.operators import PRODUCTS, factors
from .layout import COPIES


class Scaled(NamedTuple):
    """A graph with a factor.

    Attributes:
        graph: the graph.
        output: the factor of its outputs.
        at_node: the power of the factor in the operator's result.
        made: the names of operators with other inputs or numbers.
        steps: what else to write, as imperative clauses.
    """
    graph: Graph
    output: float
    at_node: Fraction
    made: List[str]
    steps: List[str]


class CannotScale(Exception):
    """An operator has no multiple for a multiple of its input."""


MEANS = {"sum": "mean", "_np_sum": "_npi_mean"}
MULTIPLIES = frozenset(["_mul_scalar", "_npi_multiply_scalar"])
DIVIDES = frozenset(["_div_scalar", "_npi_true_divide_scalar"])
SQUARES = frozenset("""elemwise_mul broadcast_mul _npi_multiply square _npi_square _power_scalar
    _npi_power_scalar norm _npi_norm""".split())

# Operators by the power of the factor in their result, if their first input has the factor.
_FIRST = frozenset("""abs _npi_absolute relu _npx_relu max _np_max min _np_min mean _npi_mean norm
    _npi_norm Dropout SliceChannel _split_v2 broadcast_axis broadcast_to broadcast_like
    _npi_broadcast_to repeat slice_axis take pick UpSampling _contrib_AdaptiveAvgPooling2D
    _contrib_BilinearResize2D _contrib_div_sqrt_dim SequenceLast SequenceReverse depth_to_space
    space_to_depth negative _npi_negative Cast""".split()) | COPIES | MULTIPLIES | DIVIDES | {
        *MEANS}
_FIRST_IF = {"Activation": ("act_type", ("relu",)),
             "LeakyReLU": ("act_type", (None, "leaky", "prelu")),
             "Pooling": ("pool_type", (None, "max", "avg", "sum"))}
_EQUAL = frozenset("""elemwise_add broadcast_add _npi_add elemwise_sub broadcast_sub _npi_subtract
    add_n Concat _npi_concatenate stack _npi_stack _maximum broadcast_maximum _minimum
    broadcast_minimum""".split())
_CHOOSE = frozenset(["where", "_npi_where"])  # the same, after a condition
_SHIFT = frozenset("""_plus_scalar _npi_add_scalar _minus_scalar _npi_subtract_scalar _rminus_scalar
    _npi_rsubtract_scalar _maximum_scalar _minimum_scalar""".split())
_MULTIPLY = frozenset(["elemwise_mul", "broadcast_mul", "_npi_multiply"])
_DIVIDE = frozenset(["elemwise_div", "broadcast_div", "_npi_true_divide"])
_POWERS = {"sqrt": (1, 2), "_npi_sqrt": (1, 2), "rsqrt": (-1, 2), "cbrt": (1, 3),
           "_npi_cbrt": (1, 3), "square": (2, 1), "_npi_square": (2, 1), "reciprocal": (-1, 1),
           "_npi_reciprocal": (-1, 1), "_rdiv_scalar": (-1, 1),
           "_npi_rtrue_divide_scalar": (-1, 1)}
_RAISE = frozenset(["_power_scalar", "_npi_power_scalar"])
_TEMPERED = frozenset(["softmax", "log_softmax", "softmin"])
_NORMS = {"LayerNorm": 1e-5, "GroupNorm": 1e-5, "InstanceNorm": 1e-3, "L2Normalization": 1e-10}
_FREE = frozenset("""ones_like zeros_like shape_array size_array _contrib_arange_like sign
    _npi_sign""".split())


def scaled(graph: Graph, node: str, factor: float, everywhere: bool = False,
           undo: str = "") -> Scaled:
    """Returns the graph with the first input of a node times a factor.

    A sum becomes a mean: the factor must be that of a mean.

    Args:
        graph: the graph.
        node: the name of the node.
        factor: a positive number.
        everywhere: whether all readers of that input get the multiple.
        undo: the name of a multiplication by a constant that takes the factor back.

    Raises:
        CannotScale: an operator has no multiple for a multiple of its input.
    """
    at = next(each for each in graph.nodes() if each.name == node)
    if not at.inputs:
        raise CannotScale
    made = _Scaling(at, factor, everywhere, undo)
    new = graph.rewrite(made.rewritten)
    if undo and undo not in made.made:
        raise CannotScale
    powers = {made.powers.get(entry.node, Fraction(0)) for entry in new.outputs}
    if len(powers) > 1:
        raise CannotScale
    return Scaled(new, factor ** float(powers.pop()), made.at_node, made.made, made.steps)


class _Scaling:
    """A factor on its way through a graph.

    Attributes:
        powers: the power of the factor in each new node's results; absent: 0.
        made, steps, at_node: as in `Scaled`.
    """

    def __init__(self, at: Node, factor: float, everywhere: bool, undo: str) -> None:
        self.at, self.factor, self.everywhere, self.undo = at, factor, everywhere, undo
        self.powers: Dict[Node, Fraction] = {}
        self.made: List[str] = []
        self.steps: List[str] = []
        self.at_node = Fraction(0)
        self._multiples: Dict[Tuple[Entry, float], Entry] = {}

    def rewritten(self, node: Node, inputs: List[Entry]) -> Node:
        """Returns an operator of the new graph."""
        first, moved = self.at.inputs[0], library.operators("moves")
        starts = node is self.at and not self.everywhere
        if self.everywhere:
            inputs = [self._times(new, Fraction(1), self.at.name) if old == first else new
                      for old, new in zip(node.inputs, inputs)]
        made, powers = node.like(inputs), [self.powers.get(e.node, Fraction(0)) for e in inputs]
        if starts and node.op in MEANS:
            made.op = MEANS[node.op]
            power = self._power(made, powers, moved) + 1
        elif starts and node.op in MULTIPLIES | DIVIDES:
            self._rescale(made, self.factor)
            power = powers[0] + 1
        else:
            if starts:
                made.inputs[0] = self._times(inputs[0], Fraction(1), node.name)
                powers[0] += 1
            power = self._power(made, powers, moved) if any(powers) else Fraction(0)
        if node is self.at:
            self.at_node = power
        if power:
            self.powers[made] = power
        return made

    def _times(self, entry: Entry, power: Fraction, reader: str) -> Entry:
        """Returns an entry times a power of the factor."""
        by = self.factor ** float(power)
        if (entry, by) not in self._multiples:
            made = Node("_mul_scalar", f"{reader}_input{len(self._multiples)}_scaled",
                        {"scalar": repr(by)}, [entry])
            self.made.append(made.name)
            self.powers[made] = self.powers.get(entry.node, Fraction(0)) + power
            self._multiples[entry, by] = Entry(made)
        return self._multiples[entry, by]

    def _rescale(self, node: Node, factor: float) -> None:
        """Multiplies the result of a multiplication or division by a constant."""
        node.attrs.update(scalar=repr(rescaled(node, factor)), is_int="False")
        self.made.append(node.name)

    def _power(self, node: Node, powers: List[Fraction], moves: FrozenSet[str]) -> Fraction:
        """Returns the power of the factor in a node's result, whose inputs have these powers. It
        may change the node's other inputs and its numbers."""
        op, power = node.op, powers[0]
        if node.name == self.undo and power == 1:
            self._rescale(node, 1 / self.factor)
            left = float(node.attrs["scalar"])
            self.steps.append(f"leave out the factor of {node.name}" if abs(left - 1) < 1e-6 else
                              f"let {node.name} {'divide' if op in DIVIDES else 'multiply'} by "
                              f"{number(left)}")
            return Fraction(0)
        if op in _FREE:
            return Fraction(0)
        if op in _EQUAL or op in _CHOOSE:
            return self._equal(node, powers, int(op in _CHOOSE))
        key, values = _FIRST_IF.get(op, ("", ()))
        if op in _FIRST or op in moves or node.attrs.get(key) in values:
            return self._with(power, powers[1:] if not op.endswith("_like") else [])
        if op in _SHIFT:
            return self._shifted(node, power)
        if op in _MULTIPLY:
            return powers[0] + powers[1]
        if op in _DIVIDE:
            return self._quotient(node, powers)
        if op in PRODUCTS and op != "RNN":
            return self._product(node, powers)
        if op in _POWERS:
            return power * Fraction(*_POWERS[op])
        if op in _RAISE:
            return power * Fraction(float(node.attrs["scalar"])).limit_denominator(12)
        return self._absorbed(node, self._with(power, powers[1:]))

    def _with(self, power: Fraction, others: List[Fraction]) -> Fraction:
        if any(others):
            raise CannotScale
        return power

    def _shifted(self, node: Node, power: Fraction) -> Fraction:
        """Gives a constant that is added the factor of the other operand."""
        constant, by = float(node.attrs["scalar"]), self.factor ** float(power)
        if constant:
            node.attrs.update(scalar=repr(constant * by), is_int="False")
            self.steps.append(f"multiply the constant of {node.name}, too, by {number(by)}")
        return power

    def _equal(self, node: Node, powers: List[Fraction], start: int) -> Fraction:
        """Gives all inputs from `start` on the same power."""
        self._with(Fraction(0), powers[:start])
        wanted = next(power for power in powers if power)
        for i, power in enumerate(powers[start:], start):
            if power != wanted:
                node.inputs[i] = self._times(node.inputs[i], wanted - power, node.name)
                self.steps.append(f"multiply input {i} of {node.name} by "
                                  f"{number(self.factor ** float(wanted - power))}, too")
        return wanted

    def _quotient(self, node: Node, powers: List[Fraction]) -> Fraction:
        """A divisor takes the factor of a sum that has become a mean."""
        over, under = powers
        if over and not under and self.at.op in MEANS:
            node.inputs[1] = self._times(node.inputs[1], over, node.name)
            self.steps.append(f"multiply the divisor of {node.name} by "
                              f"{number(self.factor ** float(over))}, too, as a mean does")
            return Fraction(0)
        return over - under

    def _product(self, node: Node, powers: List[Fraction]) -> Fraction:
        """A bias gets the factor of the product."""
        kinds = factors(node)
        power = sum((p for p, kind in zip(powers, kinds) if kind == "1"), Fraction(0))
        for i, kind in enumerate(kinds):
            if kind == "0":
                self._with(power, powers[i:i + 1])
                node.inputs[i] = self._times(node.inputs[i], power, node.name)
                self.steps.append(f"multiply the bias of {node.name}, too, by "
                                  f"{number(self.factor ** float(power))}")
        return power

    def _absorbed(self, node: Node, power: Fraction) -> Fraction:
        """Lets an operator's number take a factor back."""
        by = self.factor ** float(power)
        if node.op in _TEMPERED:
            given = node.attrs.get("temperature", "None")
            temperature = by * (1.0 if given == "None" else float(given))
            node.attrs["temperature"] = repr(temperature)
            self.steps.append(f"pass temperature={number(temperature)} to {node.name}")
        elif node.op in _NORMS:
            epsilon = float(node.attrs.get("eps", _NORMS[node.op])) * by ** 2
            node.attrs["eps"] = repr(epsilon)
            self.steps.append(f"give {node.name} the epsilon {number(epsilon)}")
        else:
            raise CannotScale
        self.made.append(node.name)
        return Fraction(0)


def rescaled(node: Node, factor: float) -> float:
    """Returns the constant with which a multiplication or division by it has a multiple of its
    result."""
    scalar = float(node.attrs["scalar"])
    return scalar / factor if node.op in DIVIDES else scalar * factor


def number(value: float) -> str:
    """Formats a number as Python code; a power of two as such."""
    mantissa, exponent = float.hex(value).rsplit("p", 1)
    if mantissa == "0x1.0000000000000" and not 2.0 ** -3 <= value <= 2.0 ** 10:
        return f"2**{int(exponent)}"
    return f"{value:.6g}"


def readers_that_divide(graph: Graph, node: str) -> Dict[str, float]:
    """Returns the multiplications by constants below 1 that depend on a node, and the constants."""
    behind, found = set(), {}
    for each in graph.nodes():
        if each.name == node or any(e.node in behind for e in each.inputs):
            behind.add(each)
            by = _constant(each) if each.name != node else None
            if by is not None and 0 < by < 1:
                found[each.name] = by
    return found


def _constant(node: Node) -> Optional[float]:
    """Returns the constant by which a node multiplies."""
    if node.op not in MULTIPLIES | DIVIDES:
        return None
    scalar = float(node.attrs["scalar"])
    return scalar if node.op in MULTIPLIES else 1 / scalar if scalar else None


# ---- epsilons -----------------------------------------------------------------------------------

_EPSILONS = {"_plus_scalar": "scalar", "_npi_add_scalar": "scalar", "_maximum_scalar": "scalar",
             "clip": "a_min", **dict.fromkeys(_NORMS, "eps")}
_SMALLEST = 2.0 ** -14  # float16's smallest normal number


def epsilons(graph: Graph) -> Dict[str, float]:
    """Returns the constants that keep a number above 0 and that float16 does not hold exactly, by
    node."""
    found = {}
    for node in graph.nodes():
        value = node.attrs.get(_EPSILONS.get(node.op, ""), _NORMS.get(node.op, 0.0))
        if value != "None" and 0 < float(value) < _SMALLEST:
            found[node.name] = float(value)
    return found


def with_epsilon(graph: Graph, names: List[str], value: float) -> Graph:
    """Returns the graph with another epsilon in these nodes."""
    def make(node: Node, inputs: List[Entry]) -> Node:
        made = node.like(inputs)
        if node.name in names:
            made.attrs[_EPSILONS[node.op]] = repr(value)
        return made
    return graph.rewrite(make)
