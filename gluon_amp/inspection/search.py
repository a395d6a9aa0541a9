"""`search`: finds the fewest nodes to keep in float32 so that a network trains as in float32.

    advise   an X-ray's advice, and then the nodes with the worst tensors
    bisect   finds how many of them to keep for the wanted SNR of gradients
    prune    returns nodes to the low format, in halves, quarters, ... and one by one
    join     keeps adjacent nodes that save casts
    verify   trains with several seeds; a failure adds the advice of an X-ray where the training
             failed, or raises the wanted SNR

The budget and Ctrl-C stop it; it returns the best result so far.
"""
from __future__ import annotations

import copy
import itertools
import math
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Set, Tuple, Union

from ..annotations import LossFunction, Network
from ..checks import counted, positive_number, whole_number
from ..cpu.library import random_numbers_kept
from ..graph.operators import PRODUCTS
from .judge import FIRST_SCALE, Training
from .measurements import BudgetSpent, Measurements, Nodes, TrainingSettings
from .network import in_groups, keep_line, kept_operators
from .session import Session
from .xray import XrayRun

_MOST_BATCHES = 16
_TRUER = 6.0  # dB by which the wanted SNR rises after a failed training


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
    keep: List[Any]
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
    if optimizer_params is not None and not isinstance(optimizer_params, dict):
        raise TypeError("optimizer_params must be a dict of the optimizer's arguments. "
                        f"Received: {optimizer_params!r}")
    positive_number(budget, "budget")
    positive_number(loss, "loss")
    positive_number(snr, "snr")
    settings = TrainingSettings(whole_number(steps, "steps", least=2),
                                whole_number(seeds, "seeds", least=1),
                                whole_number(seed, "seed", least=0), optimizer,
                                tuple(sorted((optimizer_params or {}).items())))
    if isinstance(budget, int) and budget < 3 * seeds:
        raise ValueError(f"seeds={seeds} needs a budget of at least {3 * seeds} training runs: two "
                         f"in float32 and one to verify, each. Received: budget={budget}")
    if file is not None and (os.path.isdir(file)
                             or not os.path.isdir(os.path.dirname(os.path.abspath(file)))):
        raise ValueError("file must be a path to a file, in a folder that exists. "
                         f"Received: {file!r}")

    def say(text: str) -> None:
        if progress:
            print(f"search: {text}", file=sys.stderr, flush=True)

    with Session(net, batches, loss_fn, _MOST_BATCHES, "search") as session, \
            random_numbers_kept():
        measured = Measurements(session, budget, settings, file, say)
        state = _State(measured, snr)
        try:
            _find(state, loss)
        except BudgetSpent:
            state.notes.append("the budget is spent: this is the best result so far")
        except KeyboardInterrupt:
            state.notes.append("interrupted: this is the best result so far")
        best = state.verified or state.cheapest()
        keep = keep_line(session.net, best | measured.reference.keep, sorted(state.all))
        return Search([*keep, *kept_operators(session.net)], state.choice(best),
                      best == state.verified, state.front(best), measured.runs, state.notes)


class _State:
    """The state of a search.

    Attributes:
        wanted: the wanted SNR.
        all: the nodes that may be kept.
        groups: these in groups, the first to keep first: groups without products, then the nodes
            that an X-ray advises to keep, then those with the worst tensors.
        advised: nodes that an X-ray advises to keep where a training failed.
        verified: the choice that trains as in float32.
        failed: choices that do not.
    """

    def __init__(self, measured: Measurements, wanted: float) -> None:
        self.measured, self.wanted = measured, wanted
        self.notes: List[str] = []
        self.verified: Optional[Nodes] = None
        self.failed: List[Nodes] = []
        self.advised: Nodes = frozenset()
        self.layout = measured.session.inspected().layout
        self.all: Nodes = frozenset(name for tensor in self.layout.tensors if tensor.is_low
                                    for name in self.layout.kept_for(tensor.key))
        ranks = {name: i for i, name in enumerate(self.advice())}
        last = len(ranks)
        self.groups = sorted(in_groups(measured.session.net, sorted(self.all)), key=lambda group: (
            any(name in measured.work for name in group),
            min(ranks.get(name, last) for name in group), sorted(group)))

    def advice(self, batch: int = 0, values: Optional[Dict[str, Any]] = None) -> List[str]:
        """Returns the nodes that an X-ray of a batch keeps, and then those of the worst tensors
        that are left.

        `values` are those of the parameters; None: the network's current ones. With values, only
        the first kind is returned.
        """
        session = copy.copy(self.measured.session)
        session.values = values
        run = XrayRun(session, session.float32(), 0.01, Training())
        first = run.view(session.low(), [batch], FIRST_SCALE)
        last, kept, _ = run.keep(first, [batch])  # adds to the findings
        layout = session.low(kept, watch=False).layout
        worst = [name for tensor in last.worst() if tensor.is_low
                 for name in layout.kept_for(tensor.key)] if values is None else []
        advised = [name for finding in first.findings for name in finding.keep]
        return [name for name in dict.fromkeys([*advised, *worst]) if name in self.all]

    def cheapest(self) -> Nodes:
        """Returns the cheapest choice with the wanted SNR that has not failed in training, and of
        several the one with the highest SNR; all nodes if there is none."""
        measured = self.measured
        enough = [k for k in measured.choices()
                  if measured.snr_so_far(k) >= self.wanted and k not in self.failed
                  and k >= self.advised]
        return min(enough or [self.all], key=lambda k: (measured.cost(k), -measured.snr_so_far(k)))

    def choice(self, keep: Nodes) -> Choice:
        measured = self.measured
        return Choice(keep, measured.snr_so_far(keep), measured.casts(keep), measured.share(keep))

    def front(self, best: Nodes) -> List[Choice]:
        """Returns the Pareto front of choices, the highest SNR first."""
        held = [k for k in self.measured.choices() if k == best or k not in self.failed]
        found = [self.choice(keep) for keep in held if self.measured.snr_so_far(keep) > -math.inf]
        values: List[Tuple[float, int, float, int]] = [
            (c.snr, -c.casts, c.share, -len(c.nodes)) for c in found]
        front = [c for c, mine in zip(found, values) if not any(
            other != mine and all(a >= b for a, b in zip(other, mine)) for other in values)]
        return sorted(front, key=lambda c: (-c.snr, c.casts))


def _find(state: _State, bound: float) -> None:
    """Sets the choice that trains as in float32."""
    measured = state.measured
    while True:
        keep = _joined(state, _pruned(state, _enough(state)))
        # Another measured choice may cost as little and have a higher SNR.
        keep = state.all if keep in state.failed else state.cheapest()
        if measured.trains(keep, bound):
            state.verified = keep
            return
        state.failed.append(keep)
        if keep == state.all:
            state.notes.append("training does not reach float32's loss with all nodes in float32 "
                               "either, because weights and data are 16-bit")
            return
        place = measured.failure(keep)
        before = state.advised
        if place is not None:
            state.advised |= {*state.advice(*place)}
        if state.advised <= before | keep and math.isfinite(measured.snr_so_far(keep)):
            state.wanted = max(state.wanted, measured.snr_so_far(keep)) + _TRUER


def _enough(state: _State) -> Nodes:
    """Returns the fewest of the first groups with which gradients reach the wanted SNR."""
    low, high = 0, len(state.groups)
    if state.measured.snr(state.all) < state.wanted:
        return state.all
    while low < high:
        middle = (low + high) // 2
        if state.measured.snr(_union(state.groups[:middle]) | state.advised) >= state.wanted:
            high = middle
        else:
            low = middle + 1
    return _union(state.groups[:low]) | state.advised


def _pruned(state: _State, keep: Nodes) -> Nodes:
    """Returns the groups without those that may stay in the low format, until none of the rest may.
    It tries products first, then the last groups."""
    measured = state.measured
    held = [group for group in reversed(state.groups) if group <= keep]
    size = max(len(held) // 2, 1)
    while held:
        at, before = 0, len(held)
        while at < len(held):
            fewer = held[:at] + held[at + size:]
            new, old = (_union(some) | state.advised for some in (fewer, held))
            if measured.cost(new) <= measured.cost(old) and measured.snr(new) >= state.wanted:
                held = fewer
            else:
                at += size
        if size == 1 and len(held) == before:
            break
        size = max(size // 2, 1)
    return _union(held) | state.advised


def _joined(state: _State, keep: Nodes) -> Nodes:
    """Returns these nodes, and others except products that save a cast if they are kept."""
    measured, nodes = state.measured, state.layout.nodes
    for _ in range(len(nodes)):
        makers = {e.node.name for name in keep for e in state.layout.makers(name)}
        casts = measured.casts(keep)
        saving = [n for n in sorted(makers & state.all - keep)
                  if nodes[n].op not in PRODUCTS and measured.casts(keep | {n}) < casts]
        if not saving or measured.snr(keep | {saving[0]}) < state.wanted:
            return keep
        keep |= {saving[0]}
    return keep


def _union(groups: Iterable[Set[str]]) -> Nodes:
    return frozenset(itertools.chain.from_iterable(groups))
