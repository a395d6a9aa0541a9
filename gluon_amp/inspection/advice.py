"""From counts to advice: where infinities begin, what is wrong, and which loss scales fit."""
import math
import statistics
from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Set,
    Tuple,
)

from ..formats import FLOAT32, Format
from ..graph.graph import CASTS
from ..graph.operators import LOSSES, numbers
from .session import SMALLEST_SCALE
from .statistics import Counted, Counts, Key, decibels
from .tensors import Layout, Tensor, counted_reads, varies_by

_MOST_LOST = 0.1  # of a gradient's norm, before a network is said to need something
_STANDS_OUT = 4  # times the worth of what three products in four round
_BEGINS_TO_LOSE = 0.01  # of a norm: from there on numbers are lost
_CANCELS = 20  # dB that a difference loses at least
_JUMPS = 12  # powers of two between gradients on both sides of a node, at least
_LITTLE_IS_LEFT = 0.25  # of the forward pass in the format
_SUMS = frozenset("""elemwise_add elemwise_sub broadcast_add broadcast_sub add_n _plus_scalar
    _minus_scalar _rminus_scalar _npi_add _npi_subtract _npi_add_scalar _npi_subtract_scalar
    _npi_rsubtract_scalar""".split())
_POWERS = tuple(range(-48, 49))  # of two: by which a tensor is moved to see what it loses
# What a DynamicLossScale goes down to, 1, and three bits: gradients grow from batch to batch.
_TRAINING_ENDS = 8.0


@dataclass
class Finding:
    """A node whose tensor its format does not suit.

    Attributes:
        node: the node that is to blame.
        tensor: its name.
        reason: "range above" or "range below" (numbers too large or too small for the format), with
            ", by a constant" where one of the operator is to blame; "cancellation": a difference of
            numbers that are nearly alike; "small errors move the loss"; "gradients change their
            size".
        detail: a sentence with figures.
        keep: the nodes to keep in float32.
        backward: whether the tensor is a gradient.
        certain: whether no other batch makes up for it, as in what is a mean of all batches.
        severity: "error" where values are not finite, or where no loss scale fits a gradient;
            "warning" where digits are lost, or where another batch may overflow.
    """
    node: str
    tensor: str
    reason: str
    detail: str
    keep: List[str]
    backward: bool = False
    certain: bool = False
    severity: str = "warning"


_BEYOND_FLOAT16 = 2.0 ** 40  # 65504 over the smallest number: wider formats reach further


class Window(NamedTuple):
    """The loss scales that fit, as powers of two, and the tensors that set the ends."""
    low: float
    high: float
    low_tensor: str
    high_tensor: str

    @property
    def fits(self) -> bool:
        """Whether training comes to such a scale."""
        return max(self.low, _TRAINING_ENDS) <= self.high

    @property
    def notes(self) -> List[str]:
        """What to do where scales fit that training does not come to by itself."""
        if self.fits or self.low > self.high:
            return []
        return [f"these gradients need a loss scale of {as_power(self.high)} or less, and "
                "loss_scale='dynamic' ends at 1: give amp.DynamicLossScale("
                f"{_in_python(self.high)}, minimum={_in_python(SMALLEST_SCALE)})"]

    def __str__(self) -> str:
        if self.low <= 1 and self.high > _BEYOND_FLOAT16:
            return "No loss scale is needed: all gradients fit as they are"
        said = "Loss scales that fit" if self.low <= self.high else \
            "No loss scale fits all gradients"
        return f"{said}: from {as_power(self.low)} " \
               f"({self.low_tensor or 'no gradient needs more'}) to {as_power(self.high)} " \
               f"({self.high_tensor})"


def as_power(scale: float) -> str:
    """A loss scale as text: powers of two as 2^-14."""
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{scale:g}"


def _in_python(scale: float) -> str:
    """A loss scale as Python code."""
    return as_power(scale).replace("^", "**")


def window(tensors: Iterable[Tensor], scale: float, lost: float) -> Optional[Window]:
    """The loss scales at which no gradient overflows and none loses more than this share of its
    norm. Low is above high where there is none such; None where there are no low gradients."""
    low, high = SMALLEST_SCALE, math.inf
    low_tensor = high_tensor = ""
    for tensor in tensors:
        counts = tensor.counts
        if not (tensor.key.backward and tensor.is_low) or counts is None or counts.range is None:
            continue
        most = _highest(tensor) * scale
        if most < high:
            high, high_tensor = most, tensor.name
        if counts.lost(tensor.format, low / scale) > lost:  # else its own low end is not higher
            low, low_tensor = _lowest(tensor, lost) * scale, tensor.name
    return Window(low, high, low_tensor, high_tensor) if high < math.inf else None


def _highest(tensor: Tensor) -> float:
    """By which power of two a tensor may grow: overflowed numbers count as beyond."""
    _, above = tensor.counts.headroom(tensor.format) or (0, 0)
    return 2.0 ** (above if tensor.counts.stay_finite else min(above, -1))


def _lowest(tensor: Tensor, lost: float) -> float:
    """The smallest factor at which a tensor loses no more than that."""
    fits = tensor.counts.lost_at(tensor.format, _POWERS) <= lost  # what is lost falls as they grow
    return 2.0 ** _POWERS[int(fits.argmax()) if fits.any() else -1]


def left_in_format(format_: Format, before: Iterable[Tensor],
                   after: Iterable[Tensor]) -> List[str]:
    """What there is to say where little is left in the format once nodes are kept."""
    count, left = (sum(t.is_low and not t.key.backward and t.counts is not None for t in some)
                   for some in (before, after))
    if left >= _LITTLE_IS_LEFT * count:
        return []
    other = "" if format_.exponent == FLOAT32.exponent else ", and bfloat16 has float32's range"
    return [f"after keep=, {left or 'none'} of {count} tensors of the forward pass are less "
            f"than float32: norms between the layers would keep numbers small{other}"]


# ---- findings -----------------------------------------------------------------------------------


def findings(layout: Layout, tensors: List[Tensor],
             scale: float) -> Tuple[List[Finding], List[str]]:
    """The nodes that are to blame, by the kind of fault and then in order of computation (those on
    whose digits the loss hangs by how much it does): where infinities begin, then forward tensors
    that lose their numbers, then differences that cancel, then tensors on whose last digits the
    loss hangs, then gradients that no scale fits. Then what else there is to say."""
    first: Dict[str, Finding] = {}
    judge = _Judge(layout, tensors, scale)
    for finding in judge.findings():
        held = first.setdefault(finding.node, finding)
        if held is not finding:
            held.keep = list(dict.fromkeys(held.keep + finding.keep))
    return list(first.values()), judge.notes


class _Judge:
    """Of tensors that were counted; each reads others of these."""

    def __init__(self, layout: Layout, tensors: List[Tensor], scale: float) -> None:
        self.layout, self.scale = layout, scale
        self.counts = {t.key: t.counts for t in tensors if t.counts is not None}
        self.reads = counted_reads(tensors, self.counts)
        self.seen = {t.key: t for t in tensors if t.key in self.counts}
        self.forward = sorted((t for t in self.seen.values() if not t.key.backward),
                              key=lambda t: t.place)
        self.readers: Dict[Key, List[Key]] = {}
        for tensor in self.forward:
            for key in self.reads[tensor.key]:
                self.readers.setdefault(key, []).append(tensor.key)
        self.broken = {t.key for t in unsound(tensors, self.counts)}
        self.notes: List[str] = []
        self.least_snr = min((t.low_snr for t in self.seen.values()), default=0.0)

    def before(self, tensor: Tensor) -> List[Tensor]:
        """What a tensor is computed from."""
        return [self.seen[key] for key in self.reads[tensor.key]]

    def findings(self) -> List[Finding]:
        endless = [t for t in self.forward if not t.counts.stay_finite]
        made = [finding for t in beginnings(endless, self.reads, self.counts)
                if t.key in self.broken or t.snr == -math.inf for finding in self._above(t)]
        for finding in made:
            finding.certain, finding.severity = True, "error"
        if made:  # where numbers grow from layer to layer, all from one on are to be kept
            behind = [t for t in self.forward if t.beyond and t.key in self.broken]
            made[0].keep = list(dict.fromkeys(made[0].keep + self._kept_for(behind)))
        for judge in (self._nearly_above, self._below, self._cancelled):
            made += [finding for tensor in self.forward for finding in judge(tensor)]
        if not made:  # else gradients are not what they will be
            made += self._moving_the_loss()
            if all(key.backward for key in self.broken):
                gradients = self._gradients()
                for finding in gradients:
                    finding.severity = "error"
                made += gradients
        self._note_headroom(made)
        return made

    def _note_headroom(self, made: List[Finding]) -> None:
        """Notes the tensor nearest to the format's largest number, within a factor of 2, unless a
        finding keeps it in float32."""
        kept = {name for finding in made for name in finding.keep}
        near = [t for t in self.forward if t.peak and t.counts.stay_finite
                and not kept & {*self.layout.kept_for(t.key)}]
        if near:
            tensor = max(near, key=lambda t: t.peak)
            largest = tensor.format.largest
            factor = math.ceil(100 * largest / tensor.peak) / 100
            self.notes.append(
                f"{tensor.name} is within a factor of {factor:g} of {tensor.format.name}'s largest "
                f"number, {largest:g}: larger data or weights may overflow")

    def _finding(self, tensor: Tensor, reason: str, detail: str,
                 blamed: Optional[str] = None) -> Finding:
        blamed = blamed or self.layout.blamed(tensor.key)
        if reason.startswith("range") and any(True for _ in numbers(self.layout.nodes[blamed])):
            reason += ", by a constant"
        return Finding(blamed, tensor.name, reason, detail, self._kept_for([tensor]),
                       tensor.key.backward)

    def _kept_for(self, tensors: Iterable[Tensor]) -> List[str]:
        return [name for tensor in tensors for name in self.layout.kept_for(tensor.key)]

    def _above(self, tensor: Tensor) -> List[Finding]:
        counts = tensor.counts
        if tensor.op in CASTS and not counts.overflowed:
            return []  # what it casts was not finite, such as what a plain Block hands on
        if not counts.overflowed:
            return self._of_zeros(tensor)
        most = f"up to 2^{counts.range[1] + 1}" if counts.range else "all"
        return [self._finding(
            tensor, "range above", f"{counts.overflowed / counts.numbers:.2%} of {tensor.name} "
            f"lies beyond {tensor.format.largest:g}, {most}", self._where_it_begins(
                tensor, lambda t: t.counts.shares(tensor.format)["overflowed"] > 0))]

    def _nearly_above(self, tensor: Tensor) -> List[Finding]:
        """A tensor that has overflowed in no batch so far, but may in the next."""
        by = varies_by(tensor)
        if by is None or not tensor.counts.stay_finite:
            return []
        most = max(tensor.largest)
        return [self._finding(
            tensor, "range above", f"{tensor.name} goes up to 2^{most + 1} in one batch, and to "
            f"2^{most + 1 - by} in half of them: another may lie beyond {tensor.format.largest:g}",
            self._where_it_begins(tensor, lambda t: t.counts.range is not None
                                  and t.counts.range[1] >= most))]

    def _of_zeros(self, tensor: Tensor) -> List[Finding]:
        """A tensor whose infinities no rounding has made: what it is computed from became 0, which
        a logarithm or a quotient does not take."""
        behind = reached([tensor.key], self.reads, lambda key: self.seen[key].is_low)
        rounded = [t for t in self.forward if t.key in behind and t.is_low]
        made = [self._finding(t, "range below", f"{t.counts.flushed / t.counts.numbers:.2%} of "
                              f"{t.name} becomes 0, and {tensor.name} is not finite")
                for t in rounded if t.counts.flushed]
        if made or not (rounded or tensor.is_low):
            return made
        finding = self._finding(tensor, "cancellation", f"{tensor.name} is not finite, though what "
                                "it is computed from is")
        finding.keep = [*(finding.keep if tensor.is_low else []), *self._kept_for(rounded)]
        return [finding]

    def _where_it_begins(self, tensor: Tensor, lies_beyond: Callable[[Tensor], bool]) -> str:
        """The node that makes numbers which only a later cast loses: float32 holds them between."""
        known = {tensor.key}
        while True:
            carried = [self.seen[key] for key in tensor.carried if key in self.seen]
            before = [t for t in self.before(tensor) + carried if t.key not in known
                      and not t.is_low and t.op not in CASTS and lies_beyond(t)]
            if not before:
                return self.layout.blamed(tensor.key)
            tensor = before[0]
            known.add(tensor.key)

    def _below(self, tensor: Tensor) -> List[Finding]:
        said = said_below(tensor.counts, tensor, "is")
        return [self._finding(tensor, "range below", said, self._where_it_begins(
            tensor, lambda t: t.counts.lost(tensor.format) > _BEGINS_TO_LOSE))] if said else []

    def _cancelled(self, tensor: Tensor) -> List[Finding]:
        """A tensor that is far from float32's though all that it is computed from is near. (A
        float32 tensor may be as far from it as its inputs, of less than that, allow.)"""
        if tensor.snr is None or tensor.snr >= min(tensor.low_snr, self.least_snr) / 2 \
                or not tensor.counts.stay_finite:
            return []
        read = [t for t in self.before(tensor) if t.snr is not None or t.op in CASTS]
        if not read or any(self._truth(t) < tensor.snr + _CANCELS for t in read) \
                or self._is_made_good(tensor):
            return []
        source = min(read, key=self._truth)
        finding = self._finding(
            tensor, "cancellation", f"{tensor.name} is at {tensor.snr:.0f} dB of float32's, though "
            f"what it is computed from is at {self._truth(source):.0f} dB or better")
        finding.certain = True
        made = [self._before_cast(t) for t in read]
        finding.keep += self._kept_for([t for t in made if t.is_low]
                                       or self._rounded_before(source))
        return [finding]

    def _is_made_good(self, tensor: Tensor) -> bool:
        """Whether a tensor is read by sums alone that are near float32's, so that neither they nor
        gradients depend on its digits: such as the difference in x + BlockGrad(round(x) - x)."""
        behind = [self.seen[key] for key in self.readers.get(tensor.key, ())]
        return bool(behind) and not self.layout.is_output(tensor.key) and all(
            self._is_made_good(t) if t.op in CASTS else
            t.op in _SUMS and t.snr is not None and t.snr >= t.low_snr / 2 for t in behind)

    def _truth(self, tensor: Tensor) -> float:
        """How near a tensor is to float32's, in dB. No float32 graph has casts: one is as near as
        what it casts, but for its own rounding."""
        if tensor.op not in CASTS:
            return math.inf if tensor.snr is None else tensor.snr
        noises = [10 ** (-self._truth(t) / 10) for t in self.before(tensor)]
        return decibels(1.0, sum(noises) + 10 ** (-tensor.counts.own_snr / 10))

    def _before_cast(self, tensor: Tensor) -> Tensor:
        """What a cast to float32 casts; any other tensor is itself."""
        while tensor.op in CASTS and not tensor.is_low and self.reads[tensor.key]:
            tensor = self.before(tensor)[0]
        return tensor

    def _rounded_before(self, tensor: Tensor) -> List[Tensor]:
        """Of less than float32, the tensor that a float32 one has most of its error from."""
        known = {tensor.key}
        while not tensor.is_low:
            read = [t for t in self.before(tensor) if t.key not in known]
            if not read:
                return []
            tensor = min(read, key=self._truth)
            known.add(tensor.key)
        return [tensor]

    def _moving_the_loss(self) -> List[Finding]:
        """Tensors whose rounding moves the loss by more than rounding the loss itself would, and
        far more than that of three products in four, which no training in the format does
        without, and than that of the products next to it: where these move it as much, the network
        is so sensitive there, as untrained ones are."""
        worths = {t.key: statistics.mean(t.worths) for t in self.forward if t.worths}
        products = {t.key.node: statistics.mean(t.by_chance) for t in self.forward if t.by_chance}
        made, alike = [], []
        for key, worth in sorted(worths.items(), key=lambda item: -item[1]):
            tensor = self.seen[key]
            others = sorted(w for node, w in products.items() if node != key.node)
            share = f"{worth:.2%}" if worth < 1 else "as much as it is"
            if worth <= 2.0 ** -(tensor.format.fraction + 1) \
                    or not others or worth <= _STANDS_OUT * others[3 * len(others) // 4]:
                continue
            if any(worth <= _STANDS_OUT * products[node] for node in self._next_to(tensor)):
                alike.append(f"{tensor.name} ({share})")
                continue
            made.append(self._finding(tensor, "small errors move the loss", "what rounding adds to "
                                      f"{tensor.name} moves the loss by {share} from step to step"))
        if alike and not made:
            self.notes.append("as in an untrained network, the loss moves with what rounding adds "
                              f"to one layer after another, most with that of {alike[0]}: look "
                              "again after some steps of training")
        return made

    def _next_to(self, tensor: Tensor) -> Set[str]:
        """The nearest products that a tensor is computed from, and that are computed from it."""
        found = [key for ways in (self.reads, self.readers)
                 for key in reached([tensor.key], ways, lambda key: self.seen[key].by_chance)]
        return {key.node for key in found if self.seen[key].by_chance} - {tensor.key.node}

    def _gradients(self) -> List[Finding]:
        """Where no loss scale that training comes to fits all gradients: the node at which they
        change their size most, then those that lie apart, at that end which names fewer. (Where
        most are too large, none lies apart: a lower scale is what they need.)"""
        scale = self.scale
        backward = sorted((t for t in self.seen.values() if t.key.backward and t.counts.range),
                          key=lambda t: t.place)
        gradients = [t for t in backward if t.is_low]
        found = window(gradients, scale, _MOST_LOST)
        if found is None or found.fits:
            return []

        def too_large_for(wanted: float) -> List[Tensor]:
            return [t for t in gradients if _highest(t) * scale < wanted]
        wanted, why = max(found.low, _TRAINING_ENDS), "and training's goes down to 1"
        few = found.high < _TRAINING_ENDS and 2 * len(too_large_for(wanted)) <= len(gradients)
        if found.low <= found.high and not few:
            return []
        if not few:
            wanted = found.low
            why = f"which {found.low_tensor} needs" if found.low_tensor else "the smallest of all"
        at_low = too_large_for(wanted)
        needed = [(t, _lowest(t, _MOST_LOST) * scale) for t in gradients]
        at_high = [(t, least) for t, least in needed if least > found.high]
        jump = self._jump(backward)
        made = [] if jump is None else [
            self._finding(jump, "gradients change their size", "no loss scale fits the gradients "
                          f"on both sides of {jump.name}", jump.key.node)]
        if few or not at_high or len(at_low) < len(at_high):
            return made + [self._finding(t, "range above", f"{t.name} overflows at the loss scale "
                                         f"{as_power(wanted)}, {why}") for t in at_low]
        return made + [self._finding(t, "range below", f"{t.name} needs a loss scale of "
                                     f"{as_power(least)}, and {found.high_tensor} overflows above "
                                     f"{as_power(found.high)}")
                       for t, least in at_high]

    def _jump(self, backward: List[Tensor]) -> Optional[Tensor]:
        """The gradient whose numbers differ most in size from those that it is computed from, if by
        more than 2^_JUMPS. (What a loss begins by itself has no loss scale.)"""
        best, most = None, _JUMPS
        for tensor in backward:
            here = tensor.counts.middle
            before = [t.counts.middle for t in self.before(tensor) if t.op not in LOSSES]
            steps = [abs(b - here) for b in before if b is not None and here is not None]
            if tensor.kind == "gradient" and steps and min(steps) > most:
                best, most = tensor, min(steps)
        return best


def said_below(counts: Counts, tensor: Tensor, verb: str) -> str:
    """What is said of a tensor, with these counts, that loses its small numbers; "" where it does
    not."""
    if not tensor.is_low or not counts.squares or counts.own_snr >= tensor.low_snr:
        return ""
    shares = counts.shares(tensor.format)
    return f"{tensor.name} {verb} rounded to {counts.own_snr:.0f} dB: {shares['flushed']:.1%} " \
           f"becomes 0, {shares['subnormal']:.1%} subnormal"


# ---- where infinities begin ----------------------------------------------------------------------


@dataclass
class Overflow:
    """The first tensor that is not finite though all that it is computed from is.

    Attributes:
        node: the name of the node that has computed it; or of the data or the parameter that was
            not finite before anything was computed.
        tensor: its own name.
        op: the node's operator; "" of data and parameters.
        backward: whether it is of the backward pass.
        batch: the number of the batch, from 0 on.
        scale: the loss scale of that pass.
        inputs: the names of what it read, with parameters and data, and the exponents of the
            smallest and the largest number.
        where: the user's block, with the file and line of its code, if that can be had.
    """
    node: str
    tensor: str
    op: str
    backward: bool
    batch: int
    scale: float
    inputs: Dict[str, Optional[Tuple[int, int]]]
    where: str = ""

    def __str__(self) -> str:
        if not self.op:
            return f"batch {self.batch}: {self.node} is not finite before anything is computed"
        ranges = ", ".join(f"{name} 2^{r[0]} to 2^{r[1]}" if r else f"{name} all 0"
                           for name, r in self.inputs.items())
        ranges = ranges or ("the loss" if self.backward else "parameters and data")
        which = f" at the loss scale {as_power(self.scale)}" if self.backward else ""
        where = f" ({self.where})" if self.where else ""
        return f"batch {self.batch}: {self.tensor} ({self.op}) is the first that is not " \
               f"finite{which}{where}. It is computed from: {ranges}"


def unsound(tensors: Collection[Tensor], counts: Mapping[Key, Counts]) -> List[Tensor]:
    """The tensors that are not finite, in order of computation, but for infinities that come to
    nothing: no rounding has made them, and whoever reads them makes numbers of them, as a softmax
    does of those that a mask holds."""
    broken = counts.broken() if isinstance(counts, Counted) else {
        key for key, held in counts.items() if not held.stay_finite}
    found = [t for t in tensors if t.key in broken] if broken else []
    if not found:
        return []
    found, tensors = (sorted(some, key=lambda t: t.place) for some in (found, tensors))
    reads, readers = counted_reads(tensors, counts), {}  # type: Any, Dict[Key, List[Key]]
    for tensor in tensors:
        for key in reads[tensor.key] if tensor.key in counts and not tensor.key.backward else ():
            readers.setdefault(key, []).append(tensor.key)
    made: Dict[Key, Tensor] = {}
    for tensor in reversed(found):
        held, behind = counts[tensor.key], readers.get(tensor.key, [])
        if held.overflowed or held.nan or not behind or any(key in made for key in behind):
            made[tensor.key] = tensor
    return list(made.values())[::-1]


def goes_forward(tensors: Collection[Tensor], counts: Mapping[Key, Counts]) -> bool:
    """Whether nothing breaks before the loss."""
    return all(t.key.backward for t in unsound(tensors, counts))


def first_overflow(layout: Layout, tensors: Collection[Tensor], counts: Mapping[Key, Counts],
                   batch: int, scale: float, arrays: Mapping[str, Any]) -> Optional[Overflow]:
    """In one step's counts.

    Args:
        arrays: the data and parameters that are known, by name.
    """
    broken = unsound(tensors, counts)
    if not broken:
        return None
    by_key = {tensor.key: tensor for tensor in tensors}
    reads_of = counted_reads(by_key.values(), counts)
    tensor = beginnings(broken, reads_of, counts)[0]
    cast = [by_key[key] for key in reads_of[tensor.key] if key in by_key]
    if tensor.op in CASTS and cast and layout.is_cast_back(layout.nodes[cast[0].key.node]):
        tensor = cast[0]  # which is float32 within, and rounds by that cast
    given = {name: Counts.of_array(arrays[name]) for name in tensor.variables
             if name in arrays}
    for name, held in given.items():
        if not held.finite:
            return Overflow(name, name, "", False, batch, scale, {})
    output = by_key.get(Key(tensor.key.node, False, 0))
    all_reads = dict.fromkeys(reads_of[tensor.key] + (reads_of[output.key] if output else []))
    inputs = {by_key[key].name: counts[key].range for key in all_reads if key in by_key}
    inputs.update((name, held.range) for name, held in given.items())
    return Overflow(tensor.key.node, tensor.name, tensor.op, tensor.key.backward, batch, scale,
                    inputs)


def beginnings(broken: Collection[Tensor], reads: Mapping[Key, List[Key]],
               counts: Mapping[Key, Counts]) -> List[Tensor]:
    """Of tensors that are not finite, those that are computed from no other of these, in order.
    Loops, and blocks that are called several times, go round in circles, since counts are of all
    rounds: of a circle it is one that rounding has made infinite, if there is such, and of these
    the one that has read the fewest infinities."""
    def order(tensor: Tensor) -> Tuple[bool, float, int]:
        held = counts[tensor.key]
        return not held.overflowed, (held.infinite + held.nan) / held.numbers, tensor.place
    left = {t.key: t for t in sorted(broken, key=order)}
    before = {key: [k for k in reads[key] + t.carried if k in left] for key, t in left.items()}
    behind: Dict[Key, List[Key]] = {key: [] for key in left}
    for key, found in before.items():
        for read in found:
            behind[read].append(key)
    made = [t for key, t in left.items() if not before[key]]
    follow = reached([t.key for t in made], behind)
    for key, tensor in left.items():
        if key in follow or not before[key]:
            continue
        round_ = reached([key], behind)
        if round_ >= reached([key], before):
            made.append(tensor)
            follow |= round_
    return sorted(made, key=lambda t: t.place)


def reached(keys: List[Key], ways: Mapping[Key, List[Key]],
            ends: Callable[[Key], Any] = lambda key: False) -> Set[Key]:
    """All that is reached from some keys, by one step or more, and not through where it ends."""
    found: Set[Key] = set()
    left = list(keys)
    while left:
        new = [key for key in ways.get(left.pop(), ()) if key not in found]
        found.update(new)
        left += [key for key in new if not ends(key)]
    return found
