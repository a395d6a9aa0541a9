"""`search`: finds the fewest nodes to keep in float32 so that a network trains as in float32.

    rank     scores nodes in one float32 step: the rounding error times its effect
    bisect   finds how many of the worst nodes to keep for the wanted SNR of gradients
    prune    returns nodes to the low format, in halves, quarters, ... and one by one
    join     keeps adjacent nodes that save casts
    verify   trains with several seeds; on a failure, also measures gradients where it failed, or
             raises the wanted SNR if they do not show it

The budget and Ctrl-C stop it; it returns the best result so far.
"""
import functools
import hashlib
import itertools
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union

from .._mxnet import mx, np
from ..annotations import LossFunction, Network
from ..checks import counted, positive_number, whole_number
from ..cpu.arrays import to_float32
from ..cpu.library import random_numbers_kept
from ..files import replace_text
from ..graph.arithmetic import multiply_adds
from ..graph.graph import CASTS
from ..graph.operators import PRODUCTS
from ..training.optimizer import optimizer as make_optimizer
from .advice import window
from .network import in_groups, keep_line
from .session import FIRST_SCALE, Graphs, Session, arrays_of, split
from .statistics import Counted, Counts, Key, decibels, set_aside
from .tensors import Layout

Nodes = FrozenSet[str]

_MOST_BATCHES = 16
_TRUER = 6.0  # dB by which the wanted SNR rises after a failed training
_FIRST_PLACES = 2  # batches, at the network's current weights
_HIGHEST_SCALE = 2.0 ** 24
_MOST_LOST = 0.01  # the share of a gradient's norm in the ranking of nodes
_DISTURBED = 2.0 ** -12  # relative change of the weights in the perturbed float32 training


@dataclass(frozen=True)
class Choice:
    """A measured choice of nodes that stay float32.

    Attributes:
        nodes: their names.
        snr: the gradients' SNR in dB; -infinity if one is not finite.
        casts: the number of casts in the graph.
        share: the share of the multiply-adds that stays in the low format.
    """
    nodes: FrozenSet[str]
    snr: float
    casts: int
    share: float


@dataclass
class Search:
    """The result of `search`.

    Attributes:
        keep: the value for `convert(net, policy, keep=best.keep)`, of a network that has run.
        best: its choice.
        verified: whether training with it reached float32's loss.
        front: the Pareto front of gradients' SNR, casts, arithmetic and number of nodes, without
            choices that failed in training. It contains the best.
        runs: the number of training runs.
        notes: further results as sentences.
    """
    keep: List[str]
    best: Choice
    verified: bool
    front: List[Choice]
    runs: int
    notes: List[str] = field(default_factory=list)

    def __str__(self) -> str:
        best = self.best
        said = "trains as in float32" if self.verified else "has not been trained with"
        lines = [f"{counted(len(best.nodes), 'node')} in float32: gradients at {best.snr:.1f} dB, "
                 f"{counted(best.casts, 'cast')}, {best.share:.1%} of the arithmetic low; {said}",
                 f"keep={self.keep!r}", *self.notes, "",
                 "gradients dB   casts   arithmetic low   nodes in float32"]
        lines += [f"{c.snr:12.1f}{c.casts:8}{c.share:17.1%}{len(c.nodes):19}" for c in self.front]
        return "\n".join(lines)


# ---- measurements --------------------------------------------------------------------------------


class BudgetSpent(Exception):
    """The time or the training runs are used up."""


@dataclass(frozen=True)
class Settings:
    """The settings of training runs; see `search`."""
    steps: int
    seeds: int
    seed: int
    optimizer: str
    optimizer_params: Tuple[Tuple[str, Any], ...]


class Place(NamedTuple):
    """Where gradients are compared: the index of a batch, and the parameters' values; None: the
    network's current ones."""
    batch: int
    values: Optional[Dict[str, Any]] = None


class Measure:
    """Measures choices of nodes that stay float32.

    Args:
        budget: seconds as a float, or training runs as an int.
        file: the file of measurements, which the next run loads.
        say: a function that logs measurements.
    """

    def __init__(self, session: Session, budget: float, settings: Settings, file: Optional[str],
                 say: Any) -> None:
        self.session, self.budget, self.settings = session, budget, settings
        self.file, self.say = file, say
        self.right = session.float32(watch=False)
        self.begun, self.runs = time.monotonic(), 0
        self.places = [Place(i) for i in range(min(len(session.batches), _FIRST_PLACES))]
        # by (kind, place or seed, nodes): "gradients" in dB, trainings' losses
        self.measured: Dict[Tuple[str, int, Nodes], float] = {}
        self._gradients: List[List[Any]] = []  # in float32, by place
        self._casts: Dict[Nodes, int] = {}
        self.work: Dict[str, int] = {}
        shapes = {name: p.shape for name, p in session.parameters.items()}
        for of in session.graphs.values():
            known = {**shapes, **dict(zip(of.names, of.shapes))}
            self.work.update(multiply_adds(of.clean, known))

    # ---- what is known without a run

    def casts(self, keep: Nodes) -> int:
        """Returns the number of casts in the graphs."""
        if keep not in self._casts:
            self._casts[keep] = sum(node.op in CASTS for graph, _ in self.graphs(keep).typed()
                                    for node in graph.nodes())
        return self._casts[keep]

    def graphs(self, keep: Nodes) -> Graphs:
        """Returns the network with these nodes in float32."""
        return self.session.low(keep, watch=False)

    def share(self, keep: Nodes) -> float:
        """Returns the share of the multiply-adds that stays in the low format."""
        total = sum(self.work.values())
        return 1.0 - sum(self.work.get(name, 0) for name in keep) / total if total else 1.0

    def cost(self, keep: Nodes) -> Tuple[float, int]:
        """Returns a sort key of choices: arithmetic in float32 first, then nodes and casts."""
        return round(1 - self.share(keep), 9), len(keep) + self.casts(keep)

    # ---- gradients

    def snr(self, keep: Nodes) -> float:
        """Returns the gradients' SNR against float32 in dB, the lowest of all places.

        It is the mean over parameters of noise over signal; -infinity if a gradient is not finite.
        """
        for i in range(len(self.places)):
            if ("gradients", i, keep) not in self.measured:
                self._check_time()
                self.measured["gradients", i, keep] = self._measure(i, keep)
                if i == len(self.places) - 1:
                    self._save()
                    self.say(f"{counted(len(keep), 'node')} in float32: gradients at "
                             f"{self.known(keep):.1f} dB, {self.share(keep):.1%} of the "
                             "arithmetic low")
        return self.known(keep)

    def known(self, keep: Nodes) -> float:
        """Returns the same, the lowest of the places that have been measured."""
        return min((snr for (kind, _, nodes), snr in self.measured.items()
                    if kind == "gradients" and nodes == keep), default=-math.inf)

    def choices(self) -> List[Nodes]:
        """Returns all choices that have been measured at every place."""
        return [nodes for kind, i, nodes in self.measured
                if kind == "gradients" and i == len(self.places) - 1]

    def _measure(self, place: int, keep: Nodes) -> float:
        while len(self._gradients) <= place:
            where = self.places[len(self._gradients)]
            made = self._run(self.right, where)
            if made is None:
                raise ValueError(f"batch {where.batch}: the loss or a gradient is not finite in "
                                 "float32 either: check the data, the weights and the loss first")
            self._gradients.append(made)
        found = self._run(self.graphs(keep), self.places[place])
        return -math.inf if found is None else _fidelity(self._gradients[place], found)

    def _run(self, graphs: Graphs, place: Place) -> Optional[List[Any]]:
        """Returns the gradients at a place, with the highest loss scale without overflow."""
        def prepare() -> None:
            graphs.restore(place.values)
            mx.random.seed(place.batch)
        ran = graphs.back_off(self.session.batches[place.batch], FIRST_SCALE, prepare)
        if not ran.sound:
            return None
        return [g.asnumpy().astype(np.float64) / ran.scale for g in graphs.gradients()]

    # ---- training

    def trains(self, keep: Nodes, bound: float, begins_at: float) -> bool:
        """Whether training reaches float32's loss within a tolerance.

        The tolerance is `bound` times that loss or a tenth of the initial loss, whichever is
        larger, or the difference between two float32 trainings.
        """
        seeds = range(self.settings.seed, self.settings.seed + self.settings.seeds)
        right = [self._trained("float32", frozenset(), seed) for seed in seeds]
        again = [self._trained("float32, disturbed", frozenset(), seed) for seed in seeds]
        if not all(map(math.isfinite, right)):
            raise ValueError("training in float32 does not stay finite with this optimizer: set "
                             "optimizer= and optimizer_params= as in your training")
        found = [self._trained("low", keep, seed) for seed in seeds]
        whole = max(float(np.mean(np.abs(right))), 0.1 * abs(begins_at), 1e-30)
        own = max(abs(a - b) for a, b in zip(again, right)) / whole
        apart = abs(float(np.mean(found)) - float(np.mean(right))) / whole
        self.say(f"trained with {counted(self.settings.seeds, 'seed')}: the loss is "
                 f"{apart:.2%} off float32's; two float32 trainings differ by {own:.2%}")
        return apart <= max(bound, own)

    def add_place_of_failure(self, keep: Nodes) -> bool:
        """Adds the place at which training failed to those that are measured. Returns whether the
        gradients there show the failure."""
        for (kind, seed, nodes), loss in list(self.measured.items()):
            if kind != "low" or nodes != keep or math.isfinite(loss):
                continue
            _, place = self._train("low", keep, seed)
            if place is not None and self._run(self.right, place) is not None:
                self.places.append(place)
                return self.snr(keep) == -math.inf
        return False

    def _trained(self, kind: str, keep: Nodes, seed: int) -> float:
        if (kind, seed, keep) not in self.measured:
            self._check_time()
            if isinstance(self.budget, int) and self.runs >= self.budget:
                raise BudgetSpent
            self.runs += 1
            self.measured[kind, seed, keep] = self._train(kind, keep, seed)[0]
            self._save()
        return self.measured[kind, seed, keep]

    def _train(self, kind: str, keep: Nodes, seed: int) -> Tuple[float, Optional[Place]]:
        """Trains from the network's current parameters.

        Args:
            kind: "disturbed" starts with weights changed by up to 2^-12 of their values, which
                measures the difference between two equally good trainings.
            keep: nodes in float32.
            seed: the seed of the order of batches and of the graph's random numbers.

        Returns:
            The mean loss of the second half of the steps, infinite if a loss or a gradient was not
            finite; and the place where that was.
        """
        batches, s = self.session.batches, self.settings
        graphs = self.graphs(keep) if kind == "low" else self.right
        graphs.restore()
        rng = np.random.default_rng(seed)
        order = rng.integers(0, len(batches), s.steps)
        trained = [p for name, p in self.session.parameters.items()
                   if name in graphs.arrays and p.grad_req != "null"]
        weights = [graphs.arrays[p.name].as_nd_ndarray() for p in trained]
        for weight in weights if kind.endswith("disturbed") else ():
            weight[:] = mx.nd.array(
                weight.asnumpy() * (1 + _DISTURBED * rng.uniform(-1, 1, weight.shape)))
        update = mx.optimizer.get_updater(make_optimizer(
            s.optimizer, param_dict=dict(enumerate(trained)), **dict(s.optimizer_params)))
        scale, losses = FIRST_SCALE, []  # type: float, List[float]
        for number, which in enumerate(order):
            ran = graphs.back_off(batches[which], scale, functools.partial(
                mx.random.seed, 1000 * seed + number))
            if not ran.sound:
                return math.inf, Place(which, {
                    name: to_float32(array) for name, array in graphs.arrays.items()})
            scale = ran.scale
            losses.append(ran.loss)
            update.optimizer.rescale_grad = 1 / (scale * split(batches[which])[0][0].shape[0])
            gradients = [graphs.arrays[p.name].grad.as_nd_ndarray() for p in trained]
            update([*range(len(trained))], gradients, weights)
        return float(np.mean(losses[s.steps // 2:])), None

    def _check_time(self) -> None:
        if isinstance(self.budget, float) and time.monotonic() - self.begun > self.budget:
            raise BudgetSpent

    # ---- the file

    def _fingerprint(self) -> str:
        """Returns a digest of everything that measurements depend on."""
        session = self.session
        graphs = [of.clean.structure() for of in session.graphs.values()]
        made = hashlib.sha256(repr((graphs, session.policy, self.settings,
                                    sorted(self.right.keep))).encode())
        for parameter in session.parameters.values():
            made.update(parameter.data().asnumpy().tobytes())
        for batch in session.batches:
            for array in arrays_of(batch if isinstance(batch, (list, tuple)) else [batch]):
                made.update(array.asnumpy().tobytes())
        return made.hexdigest()

    def load(self, begins_at: float) -> None:
        """Loads the file's measurements.

        Args:
            begins_at: the initial float32 loss, which identifies the loss function.
        """
        self._print, self._begins_at = self._fingerprint() if self.file else "", begins_at
        if not self.file or not os.path.exists(self.file):
            return
        with open(self.file, encoding="utf-8") as file:
            try:
                held = json.load(file)
                known, began_at = held["fingerprint"], float(held["begins_at"])
                measured = {(kind, number, frozenset(nodes)): float(value)
                            for kind, number, nodes, value in held["measured"]}
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"file={self.file!r} was not written by search") from None
        if known != self._print or not math.isclose(began_at, begins_at, rel_tol=1e-3):
            raise ValueError(f"file={self.file!r} is of another search: the network, its weights, "
                             "the batches, the loss or the settings differ. Use another name")
        self.measured = measured

    def _save(self) -> None:
        if not self.file:
            return
        held = [[kind, i, sorted(nodes), repr(value)]
                for (kind, i, nodes), value in self.measured.items()
                if kind != "gradients" or i < _FIRST_PLACES]  # others depend on this run's failures
        replace_text(self.file, json.dumps({
            "fingerprint": self._print, "begins_at": self._begins_at, "measured": held}))


def _fidelity(right: List[Any], found: List[Any]) -> float:
    numbers = sum(g.size for g in right)
    floor = 1e-4 * sum(float(np.square(g).sum()) for g in right) / max(numbers, 1)
    noise = [float(np.square(b - a).mean()) / max(float(np.square(a).mean()), floor, 1e-300)
             for a, b in zip(right, found)]
    return decibels(1.0, float(np.mean(noise))) if noise else math.inf


# ---- the search --------------------------------------------------------------------------------


@set_aside()
def search(net: Network, batches: Iterable[Any], loss_fn: Optional[LossFunction] = None,
           budget: Union[float, int] = 60.0,
           snr: float = 20.0, loss: float = 0.01, steps: int = 30, seeds: int = 3,
           optimizer: str = "adam", optimizer_params: Optional[Dict[str, Any]] = None,
           seed: int = 0, file: Optional[str] = None, progress: bool = True) -> Search:
    """Finds the fewest nodes to keep in float32, besides those of the policy and of `keep=`.

    It keeps products last, because they would lose the Tensor Cores. It works on copies: neither
    the network nor MXNet's random numbers change. Ctrl-C stops it with the best result so far.

    Args:
        net: a network that `convert` has converted, on a CPU, or a bound `gluon_amp.Module`. A
            policy without rules, such as
            `Policy("bare", "float16", "float16", norm="float16", sensitive="float16")`, leaves
            all nodes to the search.
        batches: as for `xray`; the first 16 are used.
        loss_fn: called with the network's output and the label.
        budget: seconds as a float, or training runs as an int.
        snr: the lowest SNR of gradients against float32, in dB; 20 is noise of a tenth.
        loss: the largest relative difference between the trained loss and float32's, or a tenth
            of the initial loss if that is larger. A larger difference is accepted if two float32
            trainings whose initial weights differ by 2^-12 differ as much.
        steps: the steps of each training.
        seeds: the number of trainings that verify a choice.
        optimizer, optimizer_params: the optimizer, as for gluon.Trainer.
        seed: the first seed.
        file: a file of measurements, with which a later search continues.
        progress: whether to log each measurement to stderr.

    Returns:
        A `Search`.

    Raises:
        TypeError: `net` is not converted, or `budget` is not a number.
        ValueError: the loss or a gradient is not finite in float32, or an argument is invalid.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError("budget is seconds as a float, or training runs as an int. "
                        f"Received: {budget!r}")
    positive_number(budget, "budget")
    positive_number(loss, "loss")
    positive_number(snr, "snr")
    settings = Settings(whole_number(steps, "steps", least=2),
                        whole_number(seeds, "seeds", least=1), whole_number(seed, "seed", least=0),
                        optimizer, tuple(sorted((optimizer_params or {}).items())))
    if isinstance(budget, int) and budget < 3 * seeds:
        raise ValueError(f"seeds={seeds} needs a budget of at least {3 * seeds} training runs: two "
                         f"in float32 and one to verify, each. Received: budget={budget}")
    if file is not None and (os.path.isdir(file)
                             or not os.path.isdir(os.path.dirname(os.path.abspath(file)))):
        raise ValueError("file must be a path to a file, in a folder that exists. "
                         f"Received: {file!r}")
    session = Session(net, batches, loss_fn, _MOST_BATCHES, "search")

    def say(text: str) -> None:
        if progress:
            print(f"search: {text}", file=sys.stderr, flush=True)

    with random_numbers_kept():
        measure = Measure(session, budget, settings, file, say)
        looking = _Looking(measure, snr, loss)
        try:
            looking.run()
        except BudgetSpent:
            looking.notes.append("the budget is spent: this is the best result so far")
        except KeyboardInterrupt:
            looking.notes.append("interrupted: this is the best result so far")
        return looking.result()


class _Looking:
    """The state of a search."""

    def __init__(self, measure: Measure, snr: float, loss: float) -> None:
        self.measure, self.loss, self.wanted = measure, loss, snr
        self.notes: List[str] = []
        self.verified: List[Nodes] = []
        self.failed: List[Nodes] = []
        self.layout = measure.graphs(frozenset()).layout
        scores = self._scores()
        # groups without products first
        self.groups = sorted(in_groups(measure.session.net, list(scores)), key=lambda g: (
            any(n in measure.work for n in g), -max(scores[n] for n in g), sorted(g)))
        self.all = frozenset(scores)

    def _scores(self) -> Dict[str, float]:
        """Returns a score for each node, from one float32 step."""
        session = self.measure.session
        batch, right = session.batches[0], session.float32()
        mx.random.seed(0)
        ran = right.run(batch, FIRST_SCALE)
        if not math.isfinite(ran.loss):
            raise ValueError("the loss is not finite in float32 either: check the data, the "
                             f"weights and the loss first. Received: a loss of {ran.loss}")
        self.begins_at = ran.loss
        self.measure.load(ran.loss)
        scores = ranked(self.layout, ran.counts, FIRST_SCALE, session.known(batch, right))
        if not scores:
            raise ValueError("the network has no tensors below float32: keep= keeps all of it, or "
                             "only products round their inputs")
        return scores

    # ---- the search

    def run(self) -> None:
        while True:
            keep = self._joined(self._pruned(self._enough()))
            # Another measured choice may cost as little and have a higher SNR.
            keep = self.all if keep in self.failed else self._cheapest()
            if self.measure.trains(keep, self.loss, self.begins_at):
                self.verified.append(keep)
                return
            self.failed.append(keep)
            if keep == self.all:
                self.notes.append("training does not reach float32's loss with all nodes in "
                                  "float32 either, because weights and data are 16-bit")
                return
            reached = self.measure.snr(keep)
            if not self.measure.add_place_of_failure(keep) and math.isfinite(reached):
                self.wanted = max(self.wanted, reached) + _TRUER

    def _enough(self) -> Nodes:
        """Returns the fewest of the worst groups with which gradients reach the wanted SNR."""
        low, high = 0, len(self.groups)
        if self.measure.snr(self.all) < self.wanted:
            return self.all
        while low < high:
            middle = (low + high) // 2
            if self.measure.snr(_union(self.groups[:middle])) >= self.wanted:
                high = middle
            else:
                low = middle + 1
        return _union(self.groups[:low])

    def _pruned(self, keep: Nodes) -> Nodes:
        """Returns the groups without those that may stay in the low format. It tries products
        first, then groups with the lowest score."""
        held = [g for g in reversed(self.groups) if g <= keep]
        size = max(len(held) // 2, 1)
        while held:
            at = 0
            while at < len(held):
                fewer = held[:at] + held[at + size:]
                new, old = _union(fewer), _union(held)
                if self.measure.cost(new) <= self.measure.cost(old) \
                        and self.measure.snr(new) >= self.wanted:
                    held = fewer
                else:
                    at += size
            if size == 1:
                break
            size //= 2
        return _union(held)

    def _joined(self, keep: Nodes) -> Nodes:
        """Returns these nodes, and others except products that save a cast if they are kept."""
        nodes = self.layout.nodes
        for _ in range(len(nodes)):
            makers = {e.node.name for name in keep for e in self.layout.makers(name)}
            casts = self.measure.casts(keep)
            saving = [n for n in sorted(makers & self.all - keep)
                      if nodes[n].op not in PRODUCTS and self.measure.casts(keep | {n}) < casts]
            if not saving or self.measure.snr(keep | {saving[0]}) < self.wanted:
                return keep
            keep |= {saving[0]}
        return keep

    # ---- what comes of it

    def result(self) -> Search:
        measure = self.measure
        best = self.verified[0] if self.verified else self._cheapest()
        return Search(keep_line(measure.session.net, best | measure.right.keep, sorted(self.all)),
                      self._choice(best), best in self.verified, self._front(best), measure.runs,
                      self.notes)

    def _cheapest(self) -> Nodes:
        """Returns the cheapest choice with the wanted SNR that has not failed in training, and of
        several the one with the highest SNR; all nodes if there is none."""
        measure = self.measure
        enough = [k for k in measure.choices()
                  if measure.known(k) >= self.wanted and k not in self.failed]
        return min(enough or [self.all], key=lambda k: (measure.cost(k), -measure.known(k)))

    def _choice(self, keep: Nodes) -> Choice:
        measure = self.measure
        return Choice(keep, measure.known(keep), measure.casts(keep), measure.share(keep))

    def _front(self, best: Nodes) -> List[Choice]:
        """Returns the Pareto front of choices, the highest SNR first."""
        held = [k for k in self.measure.choices() if k == best or k not in self.failed]
        found = [self._choice(keep) for keep in held if self.measure.known(keep) > -math.inf]
        values: List[Tuple[float, int, float, int]] = [
            (c.snr, -c.casts, c.share, -len(c.nodes)) for c in found]
        front = [c for c, mine in zip(found, values) if not any(
            other != mine and all(a >= b for a, b in zip(other, mine)) for other in values)]
        return sorted(front, key=lambda c: (-c.snr, c.casts))


def _union(groups: Iterable[Any]) -> Nodes:
    return frozenset(itertools.chain.from_iterable(groups))


# ---- which nodes rounding harms most -------------------------------------------------------------


def ranked(layout: Layout, counts: Counted, scale: float,
           variables: Mapping[str, Any]) -> Dict[str, float]:
    """Returns a score for each node that may stay float32, the worst first.

    The score is the rounding error of a tensor times its effect, the size of the tensor times that
    of its gradient. It is infinite if numbers are beyond the format. Histograms of a float32 step
    give the rounding error of each tensor without the errors of its inputs.

    Args:
        layout: the layout of the graph with casts.
        counts: the counts of a float32 step.
        scale: its loss scale.
        variables: the arrays that the graph reads, by name.
    """
    tensors = [t for t in layout.tensors() if t.is_low]
    for tensor in tensors:
        tensor.counts = counts.get(tensor.key)
    fits = window(tensors, scale, _MOST_LOST)
    factor = (min(fits.high, _HIGHEST_SCALE) if fits else scale) / scale

    def made_by(key: Key) -> Tuple[Key, bool]:
        """Returns the output of a gradient or the input of a cast, and whether it is a variable."""
        node, output = layout.makers(key.node)[key.which if key.backward else 0]
        return Key(node.name, False, output), node.is_variable

    sizes: Dict[Key, float] = {}  # sizes of outputs times those of their gradients
    for key, gradient in counts.items():
        if key.backward and key.node in layout.nodes and key.which < len(layout.makers(key.node)):
            of, _ = made_by(key)
            if of in counts:
                size = math.sqrt(counts[of].squares * gradient.squares)
                sizes[of] = max(sizes.get(of, 0.0), size)
    most = max(sizes.values(), default=0.0) or 1.0
    scores: Dict[str, float] = {}
    for tensor in tensors:
        found, of, is_variable = tensor.counts, tensor.key, False
        if found is None and not of.backward and layout.makers(of.node):  # no casts in float32
            cast, is_variable = made_by(of)
            found = counts.get(cast)
            if is_variable and cast.node in variables:
                found = Counts.of_array(variables[cast.node].astype("float32"))
        if found is None:
            continue
        if of.backward:
            of, is_variable = made_by(of)
            found = found.times(factor)
        harm = found.noise(tensor.format)
        if math.isfinite(harm):  # all of a weight's gradient matters
            harm *= 1.0 if is_variable and tensor.key.backward else sizes.get(of, 0.0) / most
        for name in layout.kept_for(tensor.key):
            scores[name] = scores.get(name, 0.0) + harm
    return dict(sorted(scores.items(), key=lambda item: -item[1]))
