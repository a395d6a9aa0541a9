"""Changes at the source of a fault, which an X-ray tries: of graphs, data, labels, losses, scales.

A `Change` has what to write, and how a session runs with it. A trial runs the changed network in
its policy and in float32. The change helps if the finding disappears, gradients are as close to
float32's as with `keep=`, and float32's own loss is the same up to the factor of the change.
"""
from __future__ import annotations

import copy
import itertools
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
)

from .._mxnet import mx, np
from ..annotations import LossFunction
from ..cpu import library
from ..graph.graph import CASTS, Entry, Graph, Node
from ..graph.operators import BATCH_NORMS, NORMS, PRODUCTS
from .judge import FIRST_SCALE, SMALLEST_SCALE, Finding, Window
from .layout import COPIES
from .modules import HeadLosses
from .rewrites import (
    DIVIDES,
    MEANS,
    MULTIPLIES,
    SQUARES,
    CannotScale,
    Scaled,
    epsilons,
    number,
    readers_that_divide,
    rescaled,
    scaled,
    with_epsilon,
)
from .session import Batch, Session
from .tensors import Tensor, decibels

_ROUNDS = 12  # changes of one network
_MOST_TRIES = 4  # of ways to divide before a node
_MOST_STEPS = 2  # other places to change then
_HEADROOM = 3  # bits below float16's largest number, or below the overflow of gradients
_UNCHANGED = 1e-3  # threshold: the relative difference of losses in float32
_ENOUGH = 20.0  # threshold in dB: gradients that train as float32's
_GOOD = 40.0  # threshold in dB: better ones need not equal those with keep=
_LESS = 6.0  # threshold in dB: by how much gradients may be below those with keep=
_FLOOR = 1e-4  # threshold: the mean square of a gradient over that of all
_RISES = 3.0  # threshold in dB: by how much another loss scale must improve gradients
_DIFFER = 8  # threshold: the spread of all numbers over that of a column
_NORMAL = 3  # threshold: the exponent of data or labels that are normalized
_EPSILONS = (1e-6, 1e-5, 1e-4, 1e-3)
_INDICES = 4096  # labels that are integers up to this may be indices of classes


def _same(given: Any) -> Any:
    return given


@dataclass
class Change:
    """A change at the source of a fault, which an X-ray has tried.

    Attributes:
        kind: "divide earlier", "mean", "normalize data", "normalize labels", "divide the loss",
            "larger epsilon" or "loss scale".
        node: the node of the finding that it removes; of a loss scale, the gradient that needs it.
        text: what to write.
        factor: the factor by which it multiplies float32's loss; None: the loss is another one.
        together: whether it helps together with the other changes only.
        snr: the SNR of the gradients with it against float32, in dB.
        kept_snr: the same with the X-ray's `keep=` instead; None without.
        graph: returns a graph with the change.
        batch: returns a batch with the change.
        loss: returns a loss function with the change.
        made: the nodes that it changes.
    """
    kind: str
    node: str
    text: str
    factor: Optional[float] = 1.0
    together: bool = False
    snr: Optional[float] = None
    kept_snr: Optional[float] = None
    graph: Callable[[Graph], Graph] = field(default=_same, repr=False)
    batch: Callable[[Batch], Batch] = field(default=_same, repr=False)
    loss: Callable[[LossFunction], LossFunction] = field(default=_same, repr=False)
    made: List[str] = field(default_factory=list, repr=False)

    @property
    def said(self) -> str:
        """The text, and what the trial showed."""
        made = self.text
        if self.snr is not None:
            tried = "tried with the other changes" if self.together else "tried"
            kept = "" if self.kept_snr is None else f"; with keep=: {self.kept_snr:.0f} dB"
            made += f" ({tried}: gradients at {self.snr:.0f} dB against float32{kept})"
        if self.factor not in (None, 1.0):
            made += f". This multiplies the loss by {number(self.factor or 1.0)}"
        return made

    def saved(self) -> Dict[str, Any]:
        """Returns what a file holds; an infinite SNR, of equal gradients, is None."""
        made = {name: getattr(self, name)
                for name in ("kind", "node", "text", "factor", "together", "snr", "kept_snr")}
        return {name: None if value == math.inf else value for name, value in made.items()}

    def applied(self, session: Session) -> Session:
        """Returns a session with the change."""
        made = copy.copy(session)
        made.graphs = {which: of._replace(clean=self.graph(of.clean))
                       for which, of in session.graphs.items()}
        made.batches = [self.batch(batch) for batch in session.batches]
        made.loss_fn = self.loss(session.loss_fn)
        return made


class _Changed(NamedTuple):
    """A network with the changes so far: its steps, their result, and float32's losses."""
    run: Any
    view: Any
    losses: List[float]


class ChangeTrials:
    """Tries changes of an X-rayed network.

    Args:
        run: the network's steps, an `XrayRun`.
        view: the result of the X-ray, a `View`.
        batches: the numbers of its batches that give advice.
    """

    def __init__(self, run: Any, view: Any, batches: List[int]) -> None:
        self.run = replace(run, reference=run.reference or run.session.float32())
        self.view, self.batches = view, batches
        self.first = _Changed(self.run, view, [])
        self.scale = max(view.scale, min(FIRST_SCALE, view.training.largest))

    def remove(self, findings: List[Finding], most: Optional[int] = None,
               kept: Any = None) -> List[Change]:
        """Returns changes that remove findings of the network.

        They are alternatives, one of each kind, if each leaves no faults. Otherwise they belong
        together, and what they leave is for `keep=`.

        Args:
            findings: those to remove.
            most: `keep=` must keep fewer nodes than these to help; None: any number.
            kept: the result with the X-ray's `keep=`.
        """
        kept_snr = None if kept is None else gradients_snr(kept)
        there = {(finding.node, finding.backward) for finding in self.view.findings}
        for finding in findings:
            if (finding.node, finding.backward) not in there:
                continue  # not after the trainer's steps
            helping = list(self._that_help(self.first, finding))
            whole = {change.kind: replace(change, snr=snr, kept_snr=kept_snr)
                     for change, state in reversed(helping) if _is_whole(state.view)
                     for snr in [gradients_snr(state.view)] if _is_enough(snr, kept_snr)}
            if whole:
                return [*whole.values()][::-1]
            if helping:
                return self._and_more(findings, *helping[0], most, kept_snr)
        return []

    def _and_more(self, findings: List[Finding], change: Change, state: _Changed,
                  most: Optional[int], kept_snr: Optional[float]) -> List[Change]:
        """Returns a change, and others that it needs. See `remove`."""
        made = [change]
        while len(made) < _ROUNDS and not _is_whole(state.view):
            found = next((found for finding in state.view.findings if not finding.remedy
                          for found in self._that_help(state, finding)), None)
            if found is None:
                break
            change, state = found
            made.append(change)
        last = state.view
        if not _is_whole(last):
            last, names, _ = state.run.keep(last, self.batches)
            removed = {change.node for change in made}
            spared = {name for f in findings if f.node in removed for name in f.keep}
            if any(not finding.remedy for finding in last.findings) or names & spared \
                    or most is not None and len(names) >= most:
                return []
        snr = gradients_snr(last)
        return [replace(change, snr=snr, kept_snr=kept_snr, together=len(made) > 1)
                for change in made] if _is_enough(snr, kept_snr) else []

    def loss_scale(self, window: Optional[Window], keep: Iterable[str] = ()) -> Optional[Change]:
        """Returns a loss scale with which gradients are closer to float32's, if the training's
        loss scales do not fit; `keep` has the nodes in float32."""
        training = self.view.training
        if window is None or window.low > window.high \
                or window.low <= training.largest and window.fits(training):
            return None
        after = self._run_at(window.scale, keep)
        if not _is_at(after, window.scale):  # infinities had hidden other gradients
            window = after.window or window
            after = self._run_at(window.scale, keep)
        own = min(max(window.scale, training.smallest), training.largest)
        before, snr = self._run_at(own, keep), gradients_snr(after)
        gains = _is_enough(snr, None) and (not _is_at(before, own) or snr is not None
                                           and snr >= (gradients_snr(before) or 0.0) + _RISES)
        if not gains or not _is_at(after, window.scale):
            return None
        limit = window.low_tensor if window.scale > training.largest else window.high_tensor
        return Change("loss scale", limit, window.remedy, snr=snr)

    def _run_at(self, scale: float, keep: Iterable[str]) -> Any:
        """Runs steps at a loss scale, or at lower ones if gradients overflow."""
        return self.run.view(self.run.session.low(keep), self.batches, scale)

    # ---- a trial

    def _that_help(self, state: _Changed, finding: Finding) -> Iterator[Tuple[Change, _Changed]]:
        """Yields the changes that remove a finding, and the network with each."""
        for change in candidates(state.run.session, state.view, finding, self.batches):
            session = change.applied(state.run.session)
            run = replace(state.run, session=session, reference=session.float32())
            view = run.view(session.low(), self.batches, self.scale)
            left = {(other.node, other.backward) for other in view.findings}
            gone = (finding.node, finding.backward) not in left and not any(
                (name, False) in left for name in change.made)
            if finding.backward and finding.remedy:
                gone = not any(other.remedy for other in view.findings)
            if gone and not view.left_out and self._is_unchanged(view, change, state):
                yield change, _Changed(run, view, [])

    def _is_unchanged(self, view: Any, change: Change, state: _Changed) -> bool:
        """Whether float32's losses are those of before, times the factor of the change."""
        if change.factor is None:
            return True
        batches, losses = state.run.session.batches, state.losses
        for i in self.batches[len(losses):len(view.reference_losses)]:
            ran = state.run.reference_step(batches[i], self.scale)
            losses.append(math.nan if ran is None else ran.loss)
        return all(abs(new - old * change.factor) <= _UNCHANGED * abs(old * change.factor)
                   for new, old in zip(view.reference_losses, losses))


def gradients_snr(view: Any) -> Optional[float]:
    """Returns the SNR of the parameters' gradients in dB: the mean of noise over signal, each of
    the worst step. None without a reference.

    Gradients that are nearly 0 beside the others, such as of a bias before a norm, count less.
    """
    found = [(t.snr, t.counts.squares / max(t.counts.numbers, 1)) for t in view.tensors
             if t.kind == "weight gradient" and t.snr is not None and t.counts is not None]
    if not found:
        return None
    floor = _FLOOR * sum(square for _, square in found) / len(found)
    return decibels(1.0, sum(10 ** (-snr / 10) * (square / max(square, floor) if floor else 1.0)
                             for snr, square in found) / len(found))


def _is_whole(view: Any) -> bool:
    """Whether nothing overflows or loses digits, except gradients below the format's range: the
    SNR of the parameters' gradients shows whether those matter."""
    return all(finding.backward and not finding.certain and not finding.remedy
               for finding in view.findings) and (
        view.window is None or view.window.high >= view.training.smallest)


def _is_at(view: Any, scale: float) -> bool:
    """Whether all steps had this loss scale, without overflow."""
    return all(at == scale for at, _ in view.steps)


def _is_enough(snr: Optional[float], kept: Optional[float]) -> bool:
    wanted = _ENOUGH if kept is None else min(kept - _LESS, _GOOD)
    return snr is not None and snr >= wanted


# ---- candidates ---------------------------------------------------------------------------------


def candidates(session: Session, view: Any, finding: Finding,
               batches: List[int]) -> Iterator[Change]:
    """Yields changes that may remove a finding, the least intrusive first."""
    if finding.reason.startswith("range") and not finding.backward:
        yield from _of_data(session, finding, batches)
        if finding.reason.startswith("range above") and not finding.remedy:
            tensor = next(t for t in view.tensors if t.name == finding.tensor)
            yield from _that_divide(session, tensor, finding)
    if not finding.remedy:
        yield from _of_epsilons(session, finding)
    if finding.backward and view.window and view.window.high < 2 * view.training.smallest <= 2:
        yield from _of_labels(session, finding, batches)
        yield from _of_loss(session, view, finding)


def _that_divide(session: Session, tensor: Tensor, finding: Finding) -> Iterator[Change]:
    """Yields graphs that divide before the node of a finding, those with the fewest changes first.
    """
    graphs = [(of, node) for of in session.graphs.values() for node in of.clean.nodes()
              if node.name == finding.node]
    if not graphs or tensor.counts.range is None:
        return
    of, node = graphs[0]
    above = tensor.counts.range[1] + 1 - tensor.last_exponent + _HEADROOM
    undone = readers_that_divide(of.clean, node.name)
    squares = node.op in SQUARES
    if node.op in MEANS:
        factor = 1 / _terms(session, of, node)
        tries = [_Divided(node, factor, undo=name) for name in [*undone, ""]]
    else:
        tries = [_Divided(node, by, everywhere, name) for name, by in undone.items()
                 for everywhere in ((True, False) if squares else (False,))]
        tries += [_Divided(node, 2.0 ** -(above // 2 + 1), True)] if squares else []
        tries.append(_Divided(node, 2.0 ** -above))
    made = []
    for each in tries:
        with suppress(CannotScale):
            if 0 < each.factor < 1:
                made.append((each, [each.scaled(of.clean) for of, _ in graphs]))
    is_whole = all(of.block is session.net for of in session.graphs.values())
    changes = [(steps, change) for each, found in made
               for steps, change in each.changes(found[0], is_whole and not session.is_module)
               if steps <= _MOST_STEPS and all(one.output == found[0].output for one in found)]
    for _, change in sorted(changes, key=lambda found: found[0])[:_MOST_TRIES]:
        yield change


class _Divided(NamedTuple):
    """A division before a node: the arguments of `scaled`."""
    node: Node
    factor: float
    everywhere: bool = False
    undo: str = ""

    def scaled(self, graph: Graph) -> Scaled:
        return scaled(graph, self.node.name, self.factor, self.everywhere, self.undo)

    def graph(self, graph: Graph) -> Graph:
        """Returns the graph with the division, if it has the node."""
        there = any(node.name == self.node.name for node in graph.nodes())
        return self.scaled(graph).graph if there else graph

    def changes(self, made: Scaled, may_scale: bool) -> Iterator[Tuple[int, Change]]:
        """Yields the change, after the number of other places that it changes; if the outputs have
        the factor, one of the loss instead.

        Args:
            made: the graph with the division.
            may_scale: whether the outputs are those of the network.
        """
        is_sum = self.node.op in MEANS
        steps = [*dict.fromkeys(made.steps)]
        text = ", and ".join([self._text(), *steps])
        change = Change("mean" if is_sum else "divide earlier", self.node.name, text,
                        graph=self.graph, made=made.made)
        if made.output == 1:
            yield len(steps), change
        elif may_scale and math.isclose(made.output, self.factor):
            back = 1 / made.output

            def with_output(loss_fn: LossFunction) -> LossFunction:
                return lambda output, *label: loss_fn(_times(output, back), *label)
            if is_sum:
                yield len(steps), replace(change, factor=made.output)
            text += f", and multiply the network's output by {number(back)} before the loss"
            yield len(steps) + 1, replace(change, loss=with_output, text=text)

    def _text(self) -> str:
        node, by, read = self.node, number(1 / self.factor), self.node.inputs[0].node.name
        if node.op in MEANS:
            return f"take the mean instead of the sum in {node.name}, which divides by {by}"
        if self.everywhere:
            return f"divide {read} by {by} before {node.name} and all that reads it"
        if node.op in MULTIPLIES | DIVIDES:
            verb = "divide" if node.op in DIVIDES else "multiply"
            return f"{verb} by {number(rescaled(node, self.factor))} instead of " \
                   f"{number(float(node.attrs['scalar']))} in {node.name}"
        return f"divide {read} by {by} before {node.name}"


def _times(output: Any, factor: float) -> Any:
    if isinstance(output, (list, tuple)):
        return [_times(each, factor) for each in output]
    return output * factor


def _terms(session: Session, of: Any, node: Node) -> float:
    """Returns the number of terms of a sum."""
    ends = [node.inputs[0], Entry(node)]
    symbol = Graph(ends).symbol()
    shapes = {**{name: p.shape for name, p in session.parameters.items()},
              **dict(zip(of.names, of.shapes))}
    before, after = symbol.infer_shape_partial(
        **{name: shapes[name] for name in symbol.list_inputs() if name in shapes})[1]
    return math.prod(before) / max(math.prod(after), 1)


def _of_epsilons(session: Session, finding: Finding) -> Iterator[Change]:
    """Yields graphs with a larger epsilon."""
    known = {name: value for of in session.graphs.values()
             for name, value in epsilons(of.clean).items()}
    several = [[*known]] if len(known) > 1 else []
    for value, names in itertools.product(_EPSILONS, [[name] for name in known][:3] + several):
        if any(known[name] >= value for name in names):
            continue

        def rewritten(graph: Graph, names: List[str] = names, value: float = value) -> Graph:
            return with_epsilon(graph, names, value)
        yield Change("larger epsilon", finding.node, f"use the epsilon {value:g} instead of "
                     f"{min(known[name] for name in names):g} in {', '.join(names)}",
                     graph=rewritten)


# ---- of data, labels and losses

_MEASURES = PRODUCTS | NORMS | BATCH_NORMS | MULTIPLIES | DIVIDES | frozenset("""_plus_scalar
    _npi_add_scalar _minus_scalar _npi_subtract_scalar elemwise_add broadcast_add _npi_add
    elemwise_sub broadcast_sub _npi_subtract elemwise_mul broadcast_mul _npi_multiply elemwise_div
    broadcast_div _npi_true_divide Pooling square _npi_square mean _npi_mean""".split())


def _is_measured(graph: Graph, name: str) -> bool:
    """Whether only arithmetic reads a variable, and no operator that takes it for an index."""
    readers = graph.consumers()
    left = [Entry(node) for node in graph.nodes() if node.is_variable and node.name == name]
    for entry in left:
        for reader in readers.get(entry, []):
            if reader is None:
                return False
            if reader.op in CASTS | COPIES | library.operators("moves"):
                left.append(Entry(reader))
            elif reader.op not in _MEASURES:
                return False
    return bool(left)


def _of_data(session: Session, finding: Finding, batches: List[int]) -> Iterator[Change]:
    """Yields normalized data."""
    for index, (name, measured) in sorted(_data(session).items()):
        if finding.remedy and finding.node != name or not measured:
            continue
        found = _normalized(name, [session.batches[i].data[index] for i in batches])
        if found is None:
            continue
        text, change = found

        def batch(given: Batch, index: int = index,
                  change: Callable[[Any], Any] = change) -> Batch:
            data = [*given.data]
            data[index] = change(data[index])
            return Batch(data, given.label)
        yield Change("normalize data", finding.node, f"normalize the input {name}: {text}", None,
                     batch=batch)


def _data(session: Session) -> Dict[int, Tuple[str, bool]]:
    """Returns for the number of each input of the network its name, and whether only arithmetic
    reads it. Of a plain Block, only a single input is known."""
    graphs = [*session.graphs.values()]
    own = next((of for of in graphs if of.block is session.net), None)
    if own is not None:
        return {i: (name, _is_measured(own.clean, name)) for i, name in enumerate(own.names)}
    read = [(name, _is_measured(of.clean, name)) for of in graphs for name in of.names
            if name in session.data]
    single = read and len(session.batches[0].data) == 1
    return {0: (read[0][0], all(measured for _, measured in read))} if single else {}


def _normalized(name: str, arrays: List[Any]) -> Optional[Tuple[str, Callable[[Any], Any]]]:
    """Returns how to normalize arrays that are not; by column if the columns differ."""
    numbers = [array.asnumpy().astype(np.float64) for array in arrays]
    size = math.sqrt(np.mean([np.square(each).mean() for each in numbers]))
    if not 0 < size < math.inf or abs(math.log2(size)) < _NORMAL:
        return None
    rows = np.concatenate([each.reshape(-1, each.shape[-1]) for each in numbers])
    mean, spread, spreads = rows.mean(), rows.std(), rows.std(axis=0)
    least = spreads[spreads > 0].min() if spreads.any() else 0.0
    by_column = numbers[0].ndim in (2, 3) and spread > _DIFFER * min(
        math.sqrt(np.square(spreads).mean()), _DIFFER * least)
    if by_column:
        mean, spread = rows.mean(axis=0), np.where(spreads > 0, spreads, 1.0)

    def change(array: Any) -> Any:
        made = (array.asnumpy().astype(np.float64) - mean) / spread
        return (mx.np if isinstance(array, mx.np.ndarray) else mx.nd).array(made, dtype="float32")
    if by_column:
        return "subtract the mean of each column and divide by its standard deviation", change
    if not spread:
        return None
    return f"({name} {'+' if mean < 0 else '-'} {abs(mean):.4g}) / {spread:.4g}", change


def _of_labels(session: Session, finding: Finding, batches: List[int]) -> Iterator[Change]:
    """Yields normalized labels, unless they may be indices of classes."""
    labels = [session.batches[i].label for i in batches]
    if session.is_module or any(len(label) != 1 or not isinstance(label[0], mx.nd.NDArray)
                                for label in labels):
        return
    arrays = [label[0] for label in labels]
    given = np.concatenate([array.asnumpy().reshape(-1) for array in arrays])
    if (given == np.floor(given)).all() and given.min() >= 0 and given.max() < _INDICES:
        return
    found = _normalized("label", arrays)
    if found is not None:
        text, change = found
        yield Change("normalize labels", finding.node, f"normalize the labels: {text}", None,
                     batch=lambda given: Batch(given.data, [change(given.label[0])]))


def _of_loss(session: Session, view: Any, finding: Finding) -> Iterator[Change]:
    """Yields a smaller loss."""
    if view.window is None or isinstance(session.loss_fn, HeadLosses):
        return
    factor = view.window.high / (view.training.smallest * 2.0 ** _HEADROOM)
    if SMALLEST_SCALE <= factor < 1:
        yield Change("divide the loss", finding.node, f"divide the loss by {number(1 / factor)}, "
                     "as a mean instead of a sum does", factor, loss=lambda loss_fn: (
                         lambda *given: loss_fn(*given) * factor))
