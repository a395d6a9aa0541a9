"""Judges counted tensors: the first overflow, findings, and the loss scales that fit."""
from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from ..checks import counted
from ..cpu.arrays import ADDED
from ..formats import FLOAT32, Format
from ..graph.operators import CASTS, COLUMNS, LOSSES, PRODUCTS, family, numbers
from ..training.loss_scale import DynamicLossScale, as_power
from .layout import Flow, Layout, reached
from .tensors import Counts, Key, Tensor, decibels, varies_by

_DYNAMIC = DynamicLossScale()
FIRST_SCALE = 2.0 ** 16  # the first loss scale of a step: above float16's largest number
SMALLEST_SCALE = 2.0 ** -24  # the last one: float16's smallest number
_BEYOND_FLOAT16 = 2.0 ** 40  # float16's largest over its smallest number: only wider formats
# Thresholds: results/xray/thresholds.csv has the interval of each in which no judgement changes.
_LOST = 0.01  # the share of a norm that a loss scale that fits may lose to underflow
_MOST_LOST = 0.1  # that of a gradient before it is a finding; up to 0.8
_STANDS_OUT = 4  # a tensor's effect on the loss over the products' upper quartile; from 2 to 128
_CANCELS = 20  # the loss of a difference in dB; up to 40
_JUMPS = 12  # powers of two between the gradients of a node's output and input; up to 24
# The headroom of gradients at the smallest loss scale, for later steps: results/xray/growth.csv has
# gradients that grow by 2^9 in 50 steps.
_MARGIN = 2.0 ** 10
_ERROR: Dict[str, Any] = {"certain": True, "severity": "error"}  # of a value that is not finite


@dataclass
class Finding:
    """A node with a tensor that its format does not suit.

    Attributes:
        node: the node that causes the problem.
        tensor: the tensor's name.
        reason: "range above" or "range below" (numbers too large or too small for the format), with
            ", by a constant" if the operator has a constant; "cancellation": a difference of
            nearly equal numbers; "small errors move the loss"; "gradients change their size".
        detail: a sentence with figures.
        keep: the nodes to keep in float32.
        remedy: what helps instead, if no `keep` does.
        backward: whether the tensor is a gradient.
        certain: whether one batch suffices as evidence, unlike a mean over batches.
        severity: "error" if values are not finite, or if no loss scale fits a gradient; "warning"
            if digits are lost, or if another batch may overflow.
    """
    node: str
    tensor: str
    reason: str
    detail: str
    keep: List[str]
    backward: bool = False
    certain: bool = False
    severity: str = "warning"
    remedy: str = ""

    @property
    def text(self) -> str:
        """The detail and the remedy."""
        return f"{self.detail}: {self.remedy}" if self.remedy else self.detail


class Training(NamedTuple):
    """The training that an X-ray judges.

    Attributes:
        smallest, largest: its smallest and its largest loss scale.
        checks: whether it skips steps with gradients that are not finite.
    """
    smallest: float = _DYNAMIC.minimum
    largest: float = _DYNAMIC.maximum
    checks: bool = True

    @classmethod
    def of(cls, trainer: Any) -> Training:
        """Returns that of a Trainer or a Module; without one, that of loss_scale="dynamic"."""
        if trainer is None:
            return cls()
        if not hasattr(trainer, "scaling"):  # MXNet's
            return cls(largest=1.0, checks=False)
        scale = trainer.scaling
        return cls(getattr(scale, "minimum", scale.scale), getattr(scale, "maximum", scale.scale),
                   scale.scales or trainer.max_norm is not None)

    @property
    def fails(self) -> str:
        """What it does if no step has finite gradients."""
        return "raises LossScaleError" if self.checks else "writes NaN into the weights"


class Window(NamedTuple):
    """The loss scales that fit, as powers of two, and the tensors that limit them."""
    low: float
    high: float
    low_tensor: str
    high_tensor: str

    def fits(self, training: Training) -> bool:
        """Whether dynamic loss scaling reaches such a scale."""
        return max(self.low, training.smallest) <= self.high

    def notes(self, training: Training) -> List[str]:
        """Advice if dynamic loss scaling does not reach the scales that fit, or barely."""
        if self.low > self.high:
            return []
        if not self.fits(training):
            return [f"gradients need a loss scale of {as_power(self.high)} or less, and that of "
                    f"the training ends at {as_power(training.smallest)}"]
        return [] if self.high >= _MARGIN * training.smallest else [
            f"gradients fit up to the loss scale {as_power(self.high)}, and that of the training "
            f"ends at {as_power(training.smallest)}: larger ones would overflow"]

    @property
    def remedy(self) -> str:
        """The argument with which a training has a loss scale that fits, with headroom."""
        if self.high < _MARGIN * Training().smallest:
            least = min(SMALLEST_SCALE, self.high / _MARGIN)
            return f"use amp.DynamicLossScale({_in_python(self.high)}, minimum={_in_python(least)})"
        if self.low > Training().largest:
            return f"use amp.DynamicLossScale(maximum={_in_python(self.high)})"
        return 'use loss_scale="dynamic"'

    def __str__(self) -> str:
        if self.low <= 1 and self.high > _BEYOND_FLOAT16:
            return "No loss scale is needed: all gradients fit as they are"
        start = "Loss scales that fit" if self.low <= self.high else \
            "No loss scale fits all gradients"
        return f"{start}: from {as_power(self.low)} " \
               f"({self.low_tensor or 'no gradient needs more'}) to {as_power(self.high)} " \
               f"({self.high_tensor})"


def _in_python(scale: float) -> str:
    """Formats a loss scale as Python code."""
    return as_power(scale).replace("^", "**")


def window(tensors: Iterable[Tensor], steps: Iterable[Tuple[float, Mapping[Key, Counts]]],
           underflow: float = _LOST) -> Optional[Window]:
    """Returns the loss scales at which no gradient overflows in any of these steps, and none loses
    more than this share of its norm in any. A step is its loss scale and its counts.

    Low is above high if no scale fits. Returns None if no gradient is less than float32.
    """
    low, high = SMALLEST_SCALE, math.inf
    low_tensor = high_tensor = ""
    gradients = [tensor for tensor in tensors if tensor.key.backward and tensor.is_low]
    for scale, counted_ in steps:
        for tensor in gradients:
            counts = counted_.get(tensor.key)
            if counts is None or counts.range is None:
                continue
            most = tensor.highest_factor(counts) * scale
            if most < high:
                high, high_tensor = most, tensor.name
            # otherwise `low` suffices for it
            if counts.underflow(tensor.format, low / scale) > underflow:
                low, low_tensor = tensor.lowest_factor(counts, underflow) * scale, tensor.name
    return Window(low, high, low_tensor, high_tensor) if high < math.inf else None


def left_in_format(format_: Format, before: Iterable[Tensor],
                   after: Iterable[Tensor]) -> List[str]:
    """Returns a note if few tensors remain in the format after nodes are kept."""
    count, left = (sum(t.is_low and not t.key.backward for t in some) for some in (before, after))
    if 2 * left >= count:
        return []
    other = "" if format_.exponent == FLOAT32.exponent else ", and bfloat16 has float32's range"
    return [f"keep= leaves {left} of {counted(count, 'tensor')} of the forward pass below "
            f"float32: norms between the layers would keep numbers small{other}"]


# ---- findings -----------------------------------------------------------------------------------


def findings(layout: Layout, scale: float, training: Training,
             parameters: Iterable[Tensor] = ()) -> Tuple[List[Finding], List[str]]:
    """Returns the findings and notes of counted tensors and 16-bit parameters, sorted by kind and
    then in order of computation. Gradients were counted at this loss scale.

    The kinds are overflow, underflow of forward tensors, cancellation, tensors whose rounding
    moves the loss (sorted by how much), and gradients that no scale fits.
    """
    first: Dict[str, Finding] = {}
    judge = _Judge(layout, scale, training, parameters)
    for finding in judge.findings():
        held = first.setdefault(finding.node, finding)
        if held is not finding:
            held.keep = list(dict.fromkeys(held.keep + finding.keep))
    return list(first.values()), judge.notes


class _Judge:
    """Finds problems in counted tensors."""

    def __init__(self, layout: Layout, scale: float, training: Training,
                 parameters: Iterable[Tensor]) -> None:
        self.layout, self.scale, self.training = layout, scale, training
        self.parameters = parameters
        self.flow = Flow(layout.tensors, {t.key: t.counts for t in layout.tensors
                                          if t.counts is not None})
        self.seen, self.reads = self.flow.seen, self.flow.reads
        self.forward = [t for t in self.seen.values() if not t.key.backward]
        self.broken = {t.key for t in self.flow.broken}
        self.notes: List[str] = []
        # gradients other than 0: others tell nothing of what they are the gradients of
        self.passed = {key for key, t in self.seen.items() if key.backward
                       and (t.counts.range or not t.counts.finite)}
        self.trained = {key.node for key in self.passed}
        self.least_snr = min((t.low_snr for t in self.seen.values()), default=0.0)

    def findings(self) -> List[Finding]:
        endless = [t for t in self.forward if not t.counts.stay_finite]
        findings = [f for tensor in self.flow.beginnings(endless) for f in self._above(tensor)]
        if any(finding.remedy for finding in findings):
            return findings  # infinite data are behind all else
        if findings:  # numbers may grow from layer to layer: keep all layers that overflow
            behind = [t for t in self.forward if t.beyond and t.key in self.broken]
            findings[0].keep = list(dict.fromkeys(findings[0].keep + self._kept_for(behind)))
        if self.flow.goes_forward:
            findings += self._endless_gradients()
        finite = [t for t in self.forward if t.counts.stay_finite]
        for rule, tensors in ((self._nearly_above, finite),
                              (self._below_in_parameter, self.parameters),
                              (self._below, self.forward), (self._cancelled, finite)):
            findings += [finding for tensor in tensors for finding in rule(tensor)]
        if any(finding.remedy for finding in findings):  # of data, which all else reads
            findings = [finding for finding in findings if finding.certain or finding.remedy]
        if not findings:  # keeping nodes changes the gradients
            findings += self._moving_the_loss()
            if self.flow.goes_forward:
                findings += self._gradients()
        self._note_headroom(findings)
        return findings

    def _note_headroom(self, findings: List[Finding]) -> None:
        """Notes the tensor nearest to the format's largest number, within a factor of 2, unless a
        finding keeps it in float32."""
        kept = {name for finding in findings for name in finding.keep}
        near = [t for t in self.forward if t.peak and t.counts.stay_finite
                and not kept & {*self.layout.kept_for(t.key)}]
        if near:
            tensor = max(near, key=lambda t: t.peak)
            largest = tensor.format.largest
            factor = math.ceil(100 * largest / tensor.peak) / 100
            self.notes.append(
                f"{tensor.name} is within a factor of {factor:g} of {tensor.format.name}'s largest "
                f"number, {largest:g}: larger data or weights may overflow")

    def _finding(self, tensor: Tensor, reason: str, detail: str, blamed: str = "",
                 **others: Any) -> Finding:
        blamed = blamed or self.layout.blamed(tensor.key)
        if reason.startswith("range") and any(True for _ in numbers(self.layout.nodes[blamed])):
            reason += ", by a constant"
        return Finding(blamed, tensor.name, reason, detail, self._kept_for([tensor]),
                       tensor.key.backward, **others)

    def _kept_for(self, tensors: Iterable[Tensor]) -> List[str]:
        return [name for tensor in tensors for name in self.layout.kept_for(tensor.key)]

    def _of_data(self, tensor: Tensor, reason: str, detail: str, **others: Any) -> List[Finding]:
        """Finds the network's data in a tensor that is their cast. Normalized data suit the
        format, and float32 layers would hand large numbers on from layer to layer."""
        name = self.layout.data_of(tensor.key)
        return [Finding(name, tensor.name, reason, f"data {detail} (input {name})", [],
                        remedy="normalize them", **others)] if name else []

    def _above(self, tensor: Tensor) -> List[Finding]:
        counts, ends = tensor.counts, f"{tensor.format.name} ends at {tensor.format.largest:g}"
        if tensor.key not in self.broken and tensor.snr != -math.inf:
            return []
        if not counts.overflowed:  # of a cast, the input was not finite, as that of a plain Block
            return [] if tensor.op in CASTS else self._of_rounding(tensor, tensor)
        reads = self.flow.before(tensor) if tensor.op in PRODUCTS else []
        for data in [tensor, *reads]:
            size = data.counts.range[1] if data.counts.range else 0
            # data whose squares the format does not hold
            if 2 * size > tensor.format.last_exponent and self.layout.data_of(data.key):
                then = ends if data is tensor else f"{tensor.name} overflows"
                return self._of_data(data, "range above", f"reach 2^{size}, and {then}", **_ERROR)
        most = f", up to 2^{counts.range[1]}" if counts.range else ""
        return [self._finding(
            tensor, "range above", said_above(counts, tensor) + most, self._where_it_begins(
                tensor, lambda t: t.counts.shares(tensor.format)["overflowed"] > 0), **_ERROR)]

    def _nearly_above(self, tensor: Tensor) -> List[Finding]:
        """Finds a tensor that has not overflowed, but may in another batch: its maximum exceeds
        that of the median batch by more powers of two than are left."""
        by = varies_by(tensor)
        if by is None:
            return []
        most = max(tensor.largest)
        sizes = f"2^{most} in one batch, and 2^{most - by} in the median batch: another may " \
               f"exceed {tensor.format.largest:g}"
        begins = self._where_it_begins(
            tensor, lambda t: t.counts.range is not None and t.counts.range[1] >= most)
        return self._of_data(tensor, "range above", f"reach {sizes}") or [self._finding(
            tensor, "range above", f"{tensor.name} reaches {sizes}", begins)]

    def _of_rounding(self, tensor: Tensor, output: Tensor) -> List[Finding]:
        """Finds the cause of infinities without overflow, in an output of an operator or in its
        gradient: a rounded input reached a point where the operator or its derivative is infinite,
        such as 0 of a logarithm, a quotient or a root."""
        behind = reached([output.key], self.reads, lambda key: self.seen[key].is_low)
        inputs = [t for t in self.forward if t.key in behind and t.is_low]
        lost = [(t, t.counts.shares(t.format, rounded=True)["flushed"]) for t in inputs]
        findings = [self._finding(t, "range below", f"{share:.2%} of {t.name} becomes 0, and "
                                  f"{tensor.name} is not finite", **_ERROR)
                    for t, share in lost if share]
        if findings or not (inputs or tensor.is_low):
            return findings
        finding = self._finding(tensor, "cancellation", f"{tensor.name} is not finite, although "
                                "its inputs are", **_ERROR)
        finding.keep = [*(finding.keep if tensor.is_low else []), *self._kept_for(inputs)]
        return [finding]

    def _endless_gradients(self) -> List[Finding]:
        """Finds gradients that are not finite at any loss scale."""
        endless = [t for t in self.seen.values() if t.key.backward and not t.counts.stay_finite]
        return [replace(finding, backward=True) for tensor in self.flow.beginnings(endless)
                if not tensor.counts.overflowed
                for output in [self.seen.get(Key(tensor.key.node, False, 0))] if output
                for finding in self._of_rounding(tensor, output)]

    def _where_it_begins(self, tensor: Tensor, lies_beyond: Callable[[Tensor], bool]) -> str:
        """Returns the node that computes in float32 the numbers that a later cast loses."""
        visited = {tensor.key}
        while True:
            carried = [self.seen[key] for key in tensor.carried if key in self.seen]
            before = [t for t in self.flow.before(tensor) + carried if t.key not in visited
                      and not t.is_low and t.op not in CASTS and lies_beyond(t)]
            if not before:
                return self.layout.blamed(tensor.key)
            tensor = before[0]
            visited.add(tensor.key)

    def _below_in_parameter(self, tensor: Tensor) -> List[Finding]:
        """Finds a parameter of small numbers. Those that are only added may be small."""
        name, readers = tensor.parameter, self.layout.readers_of(tensor.parameter)
        if not tensor.is_below() or not readers or self._is_only_added(name):
            return []
        return [Finding(readers[0].name, name, "range below", f"the parameter {name} is "
                        f"{said_below(tensor.counts, tensor)}",
                        [name, *(reader.name for reader in readers)])]

    def _is_only_added(self, parameter: str) -> bool:
        return parameter.endswith(ADDED) or all(
            reader.op in family("addition") for reader in self.layout.readers_of(parameter))

    def _below(self, tensor: Tensor) -> List[Finding]:
        parameter = self.layout.parameter_of(tensor.key)
        if not tensor.is_below() or parameter and self._is_only_added(parameter):
            return []
        loss = said_below(tensor.counts, tensor)
        return self._of_data(tensor, "range below", f"are {loss}") or [self._finding(
            tensor, "range below", f"{tensor.name} is {loss}", self._where_it_begins(
                tensor, lambda t: t.counts.underflow(tensor.format) > _LOST))]

    def _cancelled(self, tensor: Tensor) -> List[Finding]:
        """Finds a tensor with a much lower SNR than its inputs. A float32 tensor inherits the
        errors of its rounded inputs."""
        snr = tensor.snr
        if snr is None or snr >= min(tensor.low_snr, self.least_snr) / 2 \
                or not self._has_gradient(tensor):
            return []
        read = [t for t in self.flow.before(tensor) if t.snr is not None or t.op in CASTS]
        if not read or any(self._snr_with_casts(t) < snr + _CANCELS for t in read) \
                or self._is_absorbed(tensor):
            return []
        source = min(read, key=self._snr_with_casts)
        finding = self._finding(
            tensor, "cancellation", f"{tensor.name} has {snr:.1f} dB against float32, "
            f"although its inputs have {self._snr_with_casts(source):.1f} dB or more",
            certain=True)
        sources = [self._before_cast(t) for t in read]
        finding.keep += self._kept_for([t for t in sources if t.is_low]
                                       or self._rounded_before(source))
        return [finding]

    def _has_gradient(self, tensor: Tensor) -> bool:
        """Whether a gradient reaches a tensor. Detections, for instance, have none: their rows are
        sorted and suppressed, and one other choice moves all of them."""
        return tensor.op in COLUMNS["hands_on"] or tensor.key.node in self.trained \
            or not self.passed.isdisjoint(tensor.gradients)

    def _is_absorbed(self, tensor: Tensor) -> bool:
        """Whether only sums with a high SNR read a tensor, so that its error has no effect: such as
        the difference in x + BlockGrad(round(x) - x)."""
        behind = [self.seen[key] for key in self.flow.readers.get(tensor.key, ())]
        return bool(behind) and not self.layout.is_output(tensor.key) and all(
            self._is_absorbed(t) if t.op in CASTS else
            t.op in family("addition") and t.snr is not None and t.snr >= t.low_snr / 2
            for t in behind)

    def _snr_with_casts(self, tensor: Tensor) -> float:
        """Returns a tensor's SNR against float32 in dB. The float32 graph has no casts: the SNR of
        a cast is that of its input with the noise of its own rounding."""
        if tensor.op not in CASTS:
            return math.inf if tensor.snr is None else tensor.snr
        noises = [10 ** (-self._snr_with_casts(t) / 10) for t in self.flow.before(tensor)]
        return decibels(1.0, sum(noises) + 10 ** (-tensor.counts.own_snr / 10))

    def _before_cast(self, tensor: Tensor) -> Tensor:
        """Returns the input of a cast to float32, and any other tensor unchanged."""
        while tensor.op in CASTS and not tensor.is_low and self.reads[tensor.key]:
            tensor = self.flow.before(tensor)[0]
        return tensor

    def _rounded_before(self, tensor: Tensor) -> List[Tensor]:
        """Returns the rounded tensor from which a float32 tensor inherits most of its error."""
        visited = {tensor.key}
        while not tensor.is_low:
            read = [t for t in self.flow.before(tensor) if t.key not in visited]
            if not read:
                return []
            tensor = min(read, key=self._snr_with_casts)
            visited.add(tensor.key)
        return [tensor]

    def _moving_the_loss(self) -> List[Finding]:
        """Finds tensors whose rounding moves the loss more than rounding the loss itself would.

        It must also move the loss far more than the rounding of three in four products, and of
        the adjacent products. An untrained network is equally sensitive to adjacent layers.
        """
        sensitivities = {t.key: statistics.mean(t.loss_sensitivities) for t in self.forward
                         if t.loss_sensitivities}
        products = {t.key.node: statistics.mean(t.by_chance) for t in self.forward if t.by_chance}
        findings, alike = [], []
        for key, sensitivity in sorted(sensitivities.items(), key=lambda item: -item[1]):
            tensor = self.seen[key]
            others = sorted(w for node, w in products.items() if node != key.node)
            share = f"{sensitivity:.2%}" if sensitivity < 1 else "100% or more"
            if sensitivity <= 2.0 ** -(tensor.format.fraction + 1) \
                    or not others or sensitivity <= _STANDS_OUT * others[3 * len(others) // 4]:
                continue
            if any(sensitivity <= _STANDS_OUT * products[node] for node in self._next_to(tensor)):
                alike.append(f"{tensor.name} ({share})")
                continue
            findings.append(self._finding(
                tensor, "small errors move the loss", f"the rounding error of {tensor.name} moves "
                f"the loss by {share} in each step"))
        if alike and not findings:
            self.notes.append("as in an untrained network, the rounding errors of adjacent layers "
                              f"move the loss, most that of {alike[0]}: run the X-ray again after "
                              "some steps of training")
        return findings

    def _next_to(self, tensor: Tensor) -> Set[str]:
        """Returns the nearest products before and after a tensor."""
        keys = [key for ways in (self.reads, self.flow.readers)
                 for key in reached([tensor.key], ways, lambda key: self.seen[key].by_chance)]
        return {key.node for key in keys if self.seen[key].by_chance} - {tensor.key.node}

    def _gradients(self) -> List[Finding]:
        """Finds gradients for which dynamic loss scaling reaches no scale that fits.

        The first finding is the node at which gradients change their size most. The others are the
        gradients that are too large or too small, whichever are fewer. If most are too large, they
        need a lower scale, and the finding names it instead of nodes to keep.
        """
        scale, smallest = self.scale, self.training.smallest
        backward = [t for t in self.seen.values() if t.key.backward and t.counts.range]
        gradients = [t for t in backward if t.is_low]
        limits = window(gradients, [(scale, self.flow.counts)], _MOST_LOST)
        if limits is None or limits.fits(self.training):
            return [] if limits is None else [  # without headroom at the smallest loss scale
                self._of_all_gradients(limits, note, "warning")
                for note in limits.notes(self.training) if limits.high < 2 * smallest]

        def too_large_for(wanted: float) -> List[Tensor]:
            return [t for t in gradients if t.highest_factor(t.counts) * scale < wanted]
        wanted = max(limits.low, smallest)
        why = f"and that of the training ends at {as_power(smallest)}"
        few = limits.high < smallest and 2 * len(too_large_for(wanted)) < len(gradients)
        if limits.low <= limits.high and not few:
            return [self._of_all_gradients(limits, limits.notes(self.training)[0], "error")]
        if not few:
            wanted = limits.low
            why = f"which {limits.low_tensor} needs" if limits.low_tensor else "the smallest of all"
        at_low = too_large_for(wanted)
        needed = [(t, t.lowest_factor(t.counts, _MOST_LOST) * scale) for t in gradients]
        at_high = [(t, least) for t, least in needed if least > limits.high]
        jump = self._jump(backward)
        findings = [] if jump is None else [
            self._finding(jump, "gradients change their size", "no loss scale fits the gradients "
                          f"on both sides of {jump.name}", jump.key.node, severity="error")]
        if few or not at_high or len(at_low) < len(at_high):
            return findings + [self._finding(
                t, "range above", f"{t.name} overflows at the loss scale {as_power(wanted)}, {why}",
                severity="error") for t in at_low]
        return findings + [self._finding(
            t, "range below", f"{t.name} needs a loss scale of {as_power(least)}, and "
            f"{limits.high_tensor} overflows above {as_power(limits.high)}", severity="error")
            for t, least in at_high]

    def _of_all_gradients(self, limits: Window, detail: str, severity: str) -> Finding:
        """Returns a finding of the gradient that limits the loss scale. Keeping one layer does not
        help the others."""
        tensor = next(t for t in self.seen.values() if t.name == limits.high_tensor)
        return Finding(self.layout.blamed(tensor.key), tensor.name, "range above", detail, [],
                       backward=True, severity=severity, remedy=limits.remedy)

    def _jump(self, backward: List[Tensor]) -> Optional[Tensor]:
        """Returns the gradient whose size differs most from that of its inputs, if by more than
        2^_JUMPS. A gradient that a loss operator starts has no loss scale and is skipped."""
        best, most = None, _JUMPS
        for tensor in backward:
            here = tensor.counts.middle
            before = [t.counts.middle for t in self.flow.before(tensor) if t.op not in LOSSES]
            steps = [abs(b - here) for b in before if b is not None and here is not None]
            if tensor.kind == "gradient" and steps and min(steps) > most:
                best, most = tensor, min(steps)
        return best


def said_above(counts: Counts, tensor: Tensor) -> str:
    """Returns how a tensor with these counts overflows."""
    share = counts.shares(tensor.format, rounded=True)["overflowed"]
    return f"{share:.2%} of {tensor.name} lies beyond {tensor.format.largest:g}"


def said_below(counts: Counts, tensor: Tensor) -> str:
    """Returns how a tensor with these counts underflows."""
    shares = counts.shares(tensor.format, rounded=True)
    return f"rounded to {counts.own_snr:.1f} dB: {shares['flushed']:.2%} becomes 0, " \
           f"{shares['subnormal']:.2%} subnormal"


def without_scale(all_findings: Iterable[Finding]) -> bool:
    """Whether gradients are not finite at any loss scale."""
    return any(finding.backward and finding.certain for finding in all_findings)


def outcome(view: Any) -> str:
    """Returns what the training does on the batches of an X-ray."""
    training, fits, all_findings = view.training, view.window, view.findings
    losses = [loss for i, loss in enumerate(view.losses) if i not in view.left_out]
    lost = sum(not math.isfinite(loss) for loss in losses)
    fails = f"Training {training.fails}, because"
    if lost and lost < len(losses) and training.checks:
        return f"Training skips {lost} of {len(losses)} batches, because the loss is not finite"
    if lost:
        return f"{fails} the loss is not finite"
    if not view.goes_forward:
        return "Training runs with numbers that are not finite"
    if without_scale(all_findings):
        return f"{fails} gradients are not finite at any loss scale"
    if fits and fits.high < training.smallest:
        return f"{fails} gradients overflow at its smallest loss scale, " \
            f"{as_power(training.smallest)}"
    if fits and fits.low > fits.high:
        return "Training runs and loses gradients, because no loss scale fits all of them"
    if fits and fits.low > training.largest:
        return "Training runs and loses gradients, because they need a loss scale of at " \
            f"least {as_power(fits.low)}, and its largest is {as_power(training.largest)}"
    if any(finding.reason.startswith("range above") for finding in all_findings):
        return "Training runs on these batches, and may overflow on others"
    return "Training runs, with less accuracy than in float32" if all_findings else "Training runs"


# ---- where infinities begin ----------------------------------------------------------------------


@dataclass
class Overflow:
    """The first tensor that is not finite although its inputs are.

    Attributes:
        node: the node that computes it, or the data or the parameter that was not finite.
        tensor: the tensor's name.
        op: the node's operator; "" for data and parameters.
        backward: whether it is a gradient.
        batch: the index of the batch, from 0 on.
        scale: the loss scale.
        inputs: for the name of each input, parameters and data included, the exponents of the
            smallest and the largest number.
        where: the user's block, with the file and line of its code, if available.
        in_float32: whether the step is not finite in float32 either; only `explain` sets it.
    """
    node: str
    tensor: str
    op: str
    backward: bool
    batch: int
    scale: float
    inputs: Dict[str, Optional[Tuple[int, int]]]
    where: str = ""
    in_float32: bool = False

    def __str__(self) -> str:
        if not self.op:
            return f"batch {self.batch}: the input {self.node} is not finite"
        too = ". The step is not finite in float32 either: precision is not the cause" \
            if self.in_float32 else ""
        ranges = ", ".join(f"{name} 2^{r[0]} to 2^{r[1]}" if r else f"{name} all 0"
                           for name, r in self.inputs.items())
        ranges = ranges or ("the loss" if self.backward else "parameters and data")
        which = f" at the loss scale {as_power(self.scale)}" if self.backward else ""
        where = f" ({self.where})" if self.where else ""
        return f"batch {self.batch}: {self.tensor} ({self.op}) is the first that is not " \
               f"finite{which}{where}. Inputs: {ranges}{too}"


def first_overflow(layout: Layout, counts: Mapping[Key, Counts], batch: int, scale: float,
                   arrays: Mapping[str, Any]) -> Optional[Overflow]:
    """Returns the first overflow in one step's counts, if any. `arrays` are the data and the
    parameters."""
    flow = Flow(layout.tensors, counts)
    if not flow.broken:
        return None
    tensor = flow.beginnings(flow.broken)[0]
    cast = flow.before(tensor)
    if tensor.op in CASTS and cast and layout.is_cast_back(layout.nodes[cast[0].key.node]):
        tensor = cast[0]  # it computes in float32, and this cast rounds its result
    variables = {name: Counts.of_array(arrays[name]) for name in tensor.variables if name in arrays}
    for name, held in variables.items():
        if not held.finite:
            return Overflow(name, name, "", False, batch, scale, {})
    output = Key(tensor.key.node, False, 0)
    inputs = {flow.seen[key].name: counts[key].range
              for key in [*flow.reads[tensor.key], *flow.reads.get(output, [])]}
    inputs.update((name, held.range) for name, held in variables.items())
    return Overflow(tensor.key.node, tensor.name, tensor.op, tensor.key.backward, batch, scale,
                    inputs)
