"""What a choice of float32 nodes costs and gives: its casts, its arithmetic in the low format, and
how true its gradients are. Everything is measured once, and can be kept in a file."""
import hashlib
import json
import math
import os
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence, Tuple

from .._mxnet import mx, np
from ..annotations import LossFunction, Network
from ..checks import counted
from ..files import replace_text
from ..graph.graph import CASTS
from ..policy import POLICIES
from .arithmetic import multiply_adds
from .statistics import decibels
from .training import Place, Trained, trained
from .trial import FIRST_SCALE, LEAST_SCALE, Trial, arrays_of

Nodes = FrozenSet[str]

_FIRST_PLACES = 2  # batches, at the network's weights of now


class BudgetSpent(Exception):
    """No time, or no training run, is left."""


@dataclass(frozen=True)
class Settings:
    """How training is compared; see `search`."""
    steps: int
    seeds: int
    seed: int
    optimizer: str
    optimizer_params: Tuple[Tuple[str, Any], ...]


class Measure:
    """Measures choices of nodes that stay float32.

    Args:
        budget: seconds as a float, or training runs as an int.
        file: where measurements are kept, and taken from by the next run.
        say: told what was measured.
    """

    def __init__(self, net: Network, batches: Sequence[Any], loss_fn: LossFunction, budget: float,
                 settings: Settings, file: Optional[str], say: Callable[[str], None]) -> None:
        self.net, self.batches, self.loss_fn = net, batches, loss_fn
        self.budget, self.settings, self.file, self.say = budget, settings, file, say
        self.policy = net._amp.policy
        self.right = Trial(net, POLICIES["float32"], watch=False)
        self.right.look(batches[0])
        self.calls = self.right.calls
        self.begun, self.runs = time.monotonic(), 0
        self.places = [Place(i) for i in range(min(len(batches), _FIRST_PLACES))]
        self.found: Dict[Tuple[int, Nodes], float] = {}  # by place: in dB
        self.failures: Dict[Tuple[Nodes, int], Place] = {}
        self.losses: Dict[Tuple[str, Nodes, int], float] = {}
        self._gradients: List[List[Any]] = []  # float32's, by place
        self._casts: Dict[Nodes, int] = {}
        self.work: Dict[str, int] = {}
        for call in self.calls.values():
            shapes = {**{name: array.shape for name, array in self.right.arrays.items()},
                      **dict(zip(call.names, call.shapes))}
            self.work.update(multiply_adds(call.clean, shapes))

    # ---- what is known without a run

    def casts(self, keep: Nodes) -> int:
        """How many casts the graphs have."""
        if keep not in self._casts:
            self._casts[keep] = sum(node.op in CASTS for graph, _ in self.trial(keep).graphs()
                                    for node in graph.nodes())
        return self._casts[keep]

    def trial(self, keep: Nodes) -> Trial:
        """The network with these nodes in float32."""
        return Trial(self.net, self.policy, keep, watch=False, calls=self.calls)

    def share(self, keep: Nodes) -> float:
        """The share of the arithmetic that is not taken off the low format."""
        total = sum(self.work.values())
        return 1.0 - sum(self.work.get(name, 0) for name in keep) / total if total else 1.0

    def cost(self, keep: Nodes) -> Tuple[float, int]:
        """To compare two choices: arithmetic in float32 first, then nodes and casts."""
        return round(1 - self.share(keep), 9), len(keep) + self.casts(keep)

    # ---- gradients

    def snr(self, keep: Nodes) -> float:
        """How true the gradients are, in dB against float32's, at the worst of the places: the mean
        over the parameters of noise over signal. -infinity where one is not finite."""
        for i in range(len(self.places)):
            if (i, keep) not in self.found:
                self._check_time()
                self.found[i, keep] = self._measure(i, keep)
                if i == len(self.places) - 1:
                    self._save()
                    self.say(f"{counted(len(keep), 'node')} in float32: gradients at "
                             f"{self.known(keep):.1f} dB, {self.share(keep):.1%} of the "
                             "arithmetic low")
        return self.known(keep)

    def known(self, keep: Nodes) -> float:
        """The same, at the worst of the places where it has been measured."""
        return min((self.found[i, keep] for i in range(len(self.places))
                    if (i, keep) in self.found), default=-math.inf)

    def choices(self) -> List[Nodes]:
        """All that were measured, at every place."""
        return [keep for i, keep in self.found if i == len(self.places) - 1]

    def _measure(self, place: int, keep: Nodes) -> float:
        while len(self._gradients) <= place:
            where = self.places[len(self._gradients)]
            made = self._run(self.right, where)
            if made is None:
                raise ValueError(f"batch {where.batch}: the loss or a gradient is not finite in "
                                 "float32 either: look at the data, the weights and the loss first")
            self._gradients.append(made)
        found = self._run(self.trial(keep), self.places[place])
        return -math.inf if found is None else _fidelity(self._gradients[place], found)

    def _run(self, trial: Trial, place: Place) -> Optional[List[Any]]:
        """The gradients at a place, at the highest loss scale that overflows nothing."""
        scale = FIRST_SCALE
        while scale >= LEAST_SCALE:
            trial.copy(place.values)
            mx.random.seed(place.batch)
            ran = trial.run(self.batches[place.batch], self.loss_fn, scale)
            if not math.isfinite(ran.loss):
                return None
            if ran.finite:
                return [g.asnumpy().astype(np.float64) / scale for g in trial.gradients()]
            scale /= 16
        return None

    # ---- training

    def trains(self, keep: Nodes, bound: float, begins_at: float) -> bool:
        """Whether training ends at float32's loss, within this share of it (of a tenth of what
        training begins at, if that is more) or within what float32 cannot tell from itself."""
        seeds = range(self.settings.seed, self.settings.seed + self.settings.seeds)
        right = [self._trained("float32", frozenset(), seed) for seed in seeds]
        again = [self._trained("float32, disturbed", frozenset(), seed) for seed in seeds]
        if not all(map(math.isfinite, right)):
            raise ValueError("training in float32 does not stay finite with this optimizer: give "
                             "optimizer= and optimizer_params= as training has them")
        found = [self._trained("", keep, seed) for seed in seeds]
        whole = max(float(np.mean(np.abs(right))), 0.1 * abs(begins_at), 1e-30)
        own = max(abs(a - b) for a, b in zip(again, right)) / whole
        apart = abs(float(np.mean(found)) - float(np.mean(right))) / whole
        self.say(f"trained with {counted(self.settings.seeds, 'seed')}: the loss is "
                 f"{apart:.2%} off float32's, which is {own:.2%} off itself")
        return apart <= max(bound, own)

    def add_place_of_failure(self, keep: Nodes) -> bool:
        """Gradients are measured where training with these has failed, too, from now on. Whether
        that tells the failure."""
        for (kind, nodes, seed), loss in list(self.losses.items()):
            if kind or nodes != keep or math.isfinite(loss):
                continue
            place = self.failures.get((keep, seed)) or self._train("", keep, seed).failed
            if place is not None and self._run(self.right, place) is not None:
                self.places.append(place)
                return self.snr(keep) == -math.inf
        return False

    def _trained(self, kind: str, keep: Nodes, seed: int) -> float:
        if (kind, keep, seed) not in self.losses:
            self._check_time()
            if isinstance(self.budget, int) and self.runs >= self.budget:
                raise BudgetSpent
            self.runs += 1
            made = self._train(kind, keep, seed)
            self.losses[kind, keep, seed] = made.loss
            if made.failed is not None:
                self.failures[keep, seed] = made.failed
            self._save()
        return self.losses[kind, keep, seed]

    def _train(self, kind: str, keep: Nodes, seed: int) -> Trained:
        trial = self.right if kind else self.trial(keep)
        s = self.settings
        return trained(trial, self.batches, self.loss_fn, s.steps, seed, s.optimizer,
                       dict(s.optimizer_params), kind.endswith("disturbed"))

    def _check_time(self) -> None:
        if isinstance(self.budget, float) and time.monotonic() - self.begun > self.budget:
            raise BudgetSpent

    # ---- the file

    def _fingerprint(self) -> str:
        """A digest of all that measurements depend on."""
        graphs = [call.clean.structure() for call in self.calls.values()]
        made = hashlib.sha256(repr((graphs, self.policy, self.settings,
                                    sorted(self.right.keep))).encode())
        for array in self.right.arrays.values():
            made.update(array.asnumpy().tobytes())
        for batch in self.batches:
            for array in arrays_of(batch if isinstance(batch, (list, tuple)) else [batch]):
                made.update(array.asnumpy().tobytes())
        return made.hexdigest()

    def load(self, begins_at: float) -> None:
        """Takes over what the file holds.

        Args:
            begins_at: the loss in float32, which tells a loss function from another.
        """
        self._print, self._begins_at = self._fingerprint() if self.file else "", begins_at
        if not self.file or not os.path.exists(self.file):
            return
        with open(self.file, encoding="utf-8") as file:
            try:
                held = json.load(file)
                known, began_at = held["fingerprint"], float(held["begins_at"])
                found = {(i, frozenset(k)): float(v) for i, k, v in held["gradients"]}
                losses = {(kind, frozenset(k), seed): float(v)
                          for kind, k, seed, v in held["training"]}
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"file={self.file!r} is none that search has written") from None
        if known != self._print or not math.isclose(began_at, begins_at, rel_tol=1e-3):
            raise ValueError(f"file={self.file!r} is of another search: the network, its weights, "
                             "the batches, the loss or the settings differ. Give another name")
        self.found, self.losses = found, losses

    def _save(self) -> None:
        if not self.file:
            return
        held = {"fingerprint": self._print, "begins_at": self._begins_at,
                "gradients": [[i, sorted(k), repr(v)] for (i, k), v in self.found.items()
                              if i < _FIRST_PLACES],  # others are where this run has failed
                "training": [[kind, sorted(k), seed, repr(v)]
                             for (kind, k, seed), v in self.losses.items()]}
        replace_text(self.file, json.dumps(held))


def _fidelity(right: List[Any], found: List[Any]) -> float:
    numbers = sum(g.size for g in right)
    floor = 1e-4 * sum(float(np.square(g).sum()) for g in right) / max(numbers, 1)
    noise = [float(np.square(b - a).mean()) / max(float(np.square(a).mean()), floor, 1e-300)
             for a, b in zip(right, found)]
    return decibels(1.0, float(np.mean(noise))) if noise else math.inf
