"""`search`: the fewest nodes to keep in float32 such that a network trains as in float32.

    rank     the nodes, by one float32 step: what rounding would add, times what depends on it
    bisect   how many of the worst have to be kept so that gradients are true enough
    prune    what of these can be low after all, in halves, quarters, ... and one by one
    join     nodes whose inputs cost a cast less if they are kept, too
    verify   by training with several seeds; where it fails, gradients are measured, too, from then
             on; if only the loss is off, they have to be truer

Whatever stops it (the budget, Ctrl-C), the best so far is returned.
"""
import itertools
import math
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Tuple, Union

from .._mxnet import mx
from ..annotations import Batch, LossFunction, Network
from ..checks import counted, positive_number, whole_number
from ..cpu.library import random_numbers_kept
from ..graph.operators import PRODUCTS
from ..policy import POLICIES
from .measure import BudgetSpent, Measure, Nodes, Settings
from .modules import looked_at
from .names import in_groups, keep_line
from .ranking import ranked
from .tensors import Layout
from .trial import FIRST_SCALE, Trial, check, first_of

_MOST_BATCHES = 16
_TRUER = 6.0  # dB: what is asked for beyond the last time, where training was off


@dataclass(frozen=True)
class Choice:
    """A choice of nodes that stay float32, as it was measured.

    Attributes:
        nodes: their names.
        snr: how true gradients are, in dB; -infinity where one is not finite.
        casts: how many the graph has.
        share: of the arithmetic of convolutions and other products, what stays low.
    """
    nodes: FrozenSet[str]
    snr: float
    casts: int
    share: float


@dataclass
class Search:
    """What `search` has found.

    Attributes:
        keep: for `convert(net, policy, keep=best.keep)`, in a network that has run.
        best: the choice that this is.
        verified: whether training with it was as in float32.
        front: the choices that no other beats in all of gradients, casts, arithmetic and number of
            nodes, without those that failed in training. The best is one of them.
        runs: how many trainings were made.
        notes: what else there is to know, in sentences.
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
                 f"{best.casts} casts, {best.share:.1%} of the arithmetic low; {said}",
                 f"keep={self.keep!r}", *self.notes, "",
                 "gradients dB   casts   arithmetic low   nodes in float32"]
        lines += [f"{c.snr:12.1f}{c.casts:8}{c.share:17.1%}{len(c.nodes):19}" for c in self.front]
        return "\n".join(lines)


def search(net: Network, batches: Iterable[Any], loss_fn: Optional[LossFunction] = None,
           budget: Union[float, int] = 60.0,
           snr: float = 20.0, loss: float = 0.01, steps: int = 30, seeds: int = 3,
           optimizer: str = "adam", optimizer_params: Optional[Dict[str, Any]] = None,
           seed: int = 0, file: Optional[str] = None, progress: bool = True) -> Search:
    """Finds the fewest nodes that have to stay float32, beyond those that the policy and `keep=`
    keep already. Products, whose arithmetic it would take off Tensor Cores, come last.

    All of it runs on copies: neither the network nor MXNet's random numbers change. Ctrl-C ends
    it with the best so far.

    Args:
        net: a network that `convert` has converted, on a CPU, or a bound `gluon_amp.Module`. A
            policy without rules,
            `Policy("bare", "float16", "float16", norm="float16", sensitive="float16")`, leaves
            all to the search.
        batches: as for `xray`; the first 16 are used.
        loss_fn: called with the network's output and the label.
        budget: seconds as a float, or training runs as an int.
        snr: how true gradients must be, in dB, against float32's: 20 is noise of a tenth.
        loss: how far the trained loss may be off float32's, as a share of it, or of a tenth of what
            training begins at, if that is more. Further is allowed where two float32 trainings
            whose first weights differ by 2^-12 are further apart.
        steps: of each training.
        seeds: how many trainings decide.
        optimizer, optimizer_params: what trains, as for gluon.Trainer.
        seed: the first of the seeds.
        file: where measurements are kept. A search that finds them there goes on with them.
        progress: whether each measurement is told on stderr.
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
        raise ValueError("file is one that measurements can be kept in, in a folder that exists. "
                         f"Received: {file!r}")
    net, batches, loss_fn = looked_at(net, batches, loss_fn)
    chosen = first_of(batches, _MOST_BATCHES, "search")
    check(net, chosen[0])

    def say(text: str) -> None:
        if progress:
            print(f"search: {text}", file=sys.stderr, flush=True)

    with random_numbers_kept():
        measure = Measure(net, chosen, loss_fn, budget, settings, file, say)
        looking = _Looking(measure, snr, loss)
        try:
            looking.run()
        except BudgetSpent:
            looking.notes.append("the budget is spent: this is the best so far")
        except KeyboardInterrupt:
            looking.notes.append("interrupted: this is the best so far")
        return looking.result()


class _Looking:
    """One search: what it knows so far."""

    def __init__(self, measure: Measure, snr: float, loss: float) -> None:
        self.measure, self.loss, self.wanted = measure, loss, snr
        self.notes: List[str] = []
        self.verified: List[Nodes] = []
        self.failed: List[Nodes] = []
        net, batch = measure.net, measure.batches[0]
        low = measure.trial(frozenset())
        self.layout = Layout(low.graphs(), measure.policy, low.parameters)
        scores = self._scores(batch)
        groups = in_groups(net, list(scores))
        worst = {id(g): max(scores[n] for n in g) for g in groups}
        # what costs no arithmetic comes first
        self.groups = sorted(groups, key=lambda g: (any(n in measure.work for n in g),
                                                    -worst[id(g)], sorted(g)))
        self.scores = scores
        self.all = frozenset(scores)

    def _scores(self, batch: Batch) -> Dict[str, float]:
        """A score for each node, from one float32 step."""
        right = Trial(self.measure.net, POLICIES["float32"], calls=self.measure.calls)
        mx.random.seed(0)
        ran = right.run(batch, self.measure.loss_fn, FIRST_SCALE)
        if not math.isfinite(ran.loss):
            raise ValueError("the loss is not finite in float32 either: look at the data, the "
                             f"weights and the loss first. Received: a loss of {ran.loss}")
        self.begins_at = ran.loss
        self.measure.load(ran.loss)
        scores = ranked(self.layout, ran.counts, FIRST_SCALE, right.given(batch, right.arrays))
        if not scores:
            raise ValueError("the network has no tensors of less than float32: all of it is kept, "
                             "or only products round what they read")
        return scores

    # ---- the search

    def run(self) -> None:
        while True:
            keep = self._joined(self._pruned(self._enough()))
            # Of those that were looked at on the way, one may cost as little, and be truer.
            keep = self.all if keep in self.failed else self._cheapest()
            if self.measure.trains(keep, self.loss, self.begins_at):
                self.verified.append(keep)
                return
            self.failed.append(keep)
            if keep == self.all:
                self.notes.append("training is off float32's loss with all nodes in float32, too: "
                                  "float16 weights and data make that difference")
                return
            reached = self.measure.snr(keep)
            if not self.measure.add_place_of_failure(keep) and math.isfinite(reached):
                self.wanted = max(self.wanted, reached) + _TRUER

    def _enough(self) -> Nodes:
        """The fewest of the worst groups that make gradients true enough."""
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
        """The groups, without those that can be low after all: those that cost arithmetic are tried
        first, then those of the lowest score."""
        held = [g for g in reversed(self.groups) if g <= keep]
        size = max(len(held) // 2, 1)
        while held:
            at = 0
            while at < len(held):
                fewer = held[:at] + held[at + size:]
                if self._is_better(_union(fewer), _union(held)):
                    held = fewer
                else:
                    at += size
            if size == 1:
                break
            size //= 2
        return _union(held)

    def _is_better(self, new: Nodes, old: Nodes) -> bool:
        return self.measure.cost(new) <= self.measure.cost(old) \
            and self.measure.snr(new) >= self.wanted

    def _joined(self, keep: Nodes) -> Nodes:
        """These nodes with others, but no products, that save a cast if they are kept, too."""
        nodes = self.layout.nodes
        for _ in range(len(nodes)):
            makers = {self.layout.root(e).node.name for name in keep for e in nodes[name].inputs}
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
        return Search(keep_line(measure.net, best | measure.right.keep, sorted(self.all)),
                      self._choice(best), best in self.verified, self._front(best), measure.runs,
                      self.notes)

    def _cheapest(self) -> Nodes:
        """Of what is true enough and has not failed in training, what costs least; of several such
        the truest. All nodes where there is none."""
        measure = self.measure
        enough = [k for k in measure.choices()
                  if measure.known(k) >= self.wanted and k not in self.failed]
        return min(enough or [self.all], key=lambda k: (measure.cost(k), -measure.known(k)))

    def _choice(self, keep: Nodes) -> Choice:
        measure = self.measure
        return Choice(keep, measure.known(keep), measure.casts(keep), measure.share(keep))

    def _front(self, best: Nodes) -> List[Choice]:
        """The choices that no other one beats, the truest first."""
        held = [k for k in self.measure.choices() if k == best or k not in self.failed]
        found = [self._choice(keep) for keep in held if self.measure.known(keep) > -math.inf]
        values: List[Tuple[float, int, float, int]] = [
            (c.snr, -c.casts, c.share, -len(c.nodes)) for c in found]
        front = [c for c, mine in zip(found, values) if not any(
            other != mine and all(a >= b for a, b in zip(other, mine)) for other in values)]
        return sorted(front, key=lambda c: (-c.snr, c.casts))


def _union(groups: Iterable[Any]) -> Nodes:
    return frozenset(itertools.chain.from_iterable(groups))
