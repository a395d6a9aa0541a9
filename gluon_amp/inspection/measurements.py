"""What a search measures of nodes in float32: gradients, trainings, casts and arithmetic."""
import functools
import hashlib
import json
import math
import os
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

from .._mxnet import mx, np
from ..checks import counted
from ..cpu.arrays import to_float32
from ..files import replace_text
from ..graph.arithmetic import multiply_adds
from ..graph.graph import CASTS
from ..training.optimizer import optimizer as make_optimizer
from .judge import FIRST_SCALE
from .session import NetworkCopy, Session
from .tensors import decibels
from .updates import scales_down

Nodes = FrozenSet[str]

_PLACES = 2  # batches on which gradients are compared
_DISTURBED = 2.0 ** -12  # relative change of the weights in the perturbed float32 training


class BudgetSpent(Exception):
    """The time or the training runs are used up."""


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of training runs; see `search`."""
    steps: int
    seeds: int
    seed: int
    optimizer: str
    optimizer_params: Tuple[Tuple[str, Any], ...]


class Measurements:
    """Measurements, each made once.

    Args:
        budget: seconds as a float, or training runs as an int.
        file: the file of measurements, which the next search loads.
        say: a function that logs measurements.
    """

    def __init__(self, session: Session, budget: float, settings: TrainingSettings,
                 file: Optional[str], say: Callable[[str], None]) -> None:
        self.session, self.budget, self.settings = session, budget, settings
        self.file, self.say = file, say
        self.begun, self.runs = time.monotonic(), 0
        self.reference = session.float32(watch=False)
        self.places = range(min(len(session.batches), _PLACES))
        # by (kind, place or seed, nodes): "gradients" in dB, trainings' losses
        self.measured: Dict[Tuple[str, int, Nodes], float] = {}
        self._gradients: Dict[int, List[Any]] = {}  # in float32, by place
        self._casts: Dict[Nodes, int] = {}
        self.work: Dict[str, int] = {}  # the multiply-adds of each product
        shapes = {name: p.shape for name, p in session.parameters.items()}
        for of in session.graphs.values():
            self.work.update(multiply_adds(of.clean, {**shapes, **dict(zip(of.names, of.shapes))}))
        mx.random.seed(0)
        self.first_loss = self.reference.run(session.batches[0], FIRST_SCALE).loss
        if not math.isfinite(self.first_loss):
            raise ValueError("the loss is not finite in float32 either: check the data, the "
                             f"weights and the loss first. Received: a loss of {self.first_loss}")
        self._load()

    # ---- without a run

    def network(self, keep: Nodes) -> NetworkCopy:
        """Returns a copy of the network with these nodes in float32."""
        return self.session.low(keep, watch=False)

    def casts(self, keep: Nodes) -> int:
        """Returns the number of casts in the graphs."""
        if keep not in self._casts:
            self._casts[keep] = sum(node.op in CASTS for graph, _ in self.network(keep).mixed()
                                    for node in graph.nodes())
        return self._casts[keep]

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
        for place in self.places:
            if ("gradients", place, keep) not in self.measured:
                self._check_time()
                if place not in self._gradients:
                    reference = self._run(self.reference, place)
                    if reference is None:
                        raise ValueError(f"batch {place}: the loss or a gradient is not finite in "
                                         "float32 either: check the data, the weights and the "
                                         "loss first")
                    self._gradients[place] = reference
                found = self._run(self.network(keep), place)
                self.measured["gradients", place, keep] = -math.inf if found is None \
                    else _fidelity(self._gradients[place], found)
                if place == self.places[-1]:
                    self._save()
                    self.say(f"{counted(len(keep), 'node')} in float32: gradients at "
                             f"{self.snr_so_far(keep):.1f} dB, {self.share(keep):.1%} of the "
                             "arithmetic low")
        return self.snr_so_far(keep)

    def snr_so_far(self, keep: Nodes) -> float:
        """Returns the same, the lowest of the places that have been measured."""
        return min((self.measured[key] for place in self.places
                    if (key := ("gradients", place, keep)) in self.measured), default=-math.inf)

    def choices(self) -> List[Nodes]:
        """Returns all choices that have been measured at every place."""
        return [nodes for kind, place, nodes in self.measured
                if kind == "gradients" and place == self.places[-1]]

    def _run(self, network: NetworkCopy, place: int) -> Optional[List[Any]]:
        """Returns the gradients of a batch, with the highest loss scale without overflow."""
        mx.random.seed(place)
        ran = network.step(self.session.batches[place], scales_down(FIRST_SCALE), network.restore)
        if not ran.sound:
            return None
        return [g.asnumpy().astype(np.float64) / ran.scale for g in network.gradients()]

    # ---- training

    @property
    def _seeds(self) -> range:
        return range(self.settings.seed, self.settings.seed + self.settings.seeds)

    def trains(self, keep: Nodes, bound: float) -> bool:
        """Whether training reaches float32's loss within a tolerance.

        The tolerance is `bound` times that loss or a tenth of the initial loss, whichever is
        larger, or the difference between two float32 trainings.
        """
        none: Nodes = frozenset()
        reference, again = ([self._trained(kind, none, seed) for seed in self._seeds]
                            for kind in ("float32", "float32, disturbed"))
        if not all(map(math.isfinite, reference)):
            raise ValueError("training in float32 does not stay finite with this optimizer: set "
                             "optimizer= and optimizer_params= as in your training")
        found = [self._trained("low", keep, seed) for seed in self._seeds]
        unit = max(float(np.mean(np.abs(reference))), 0.1 * abs(self.first_loss), 1e-30)
        own = max(abs(a - b) for a, b in zip(again, reference)) / unit
        apart = abs(float(np.mean(found)) - float(np.mean(reference))) / unit
        self.say(f"trained with {counted(self.settings.seeds, 'seed')}: the loss is "
                 f"{apart:.2%} off float32's; two float32 trainings differ by {own:.2%}")
        return apart <= max(bound, own)

    def failure(self, keep: Nodes) -> Optional[Tuple[int, Dict[str, Any]]]:
        """Returns the batch and the weights at which training was not finite; None if it was."""
        for seed in self._seeds:
            if not math.isfinite(self._trained("low", keep, seed)):
                return self._train("low", keep, seed)[1]
        return None

    def _trained(self, kind: str, keep: Nodes, seed: int) -> float:
        if (kind, seed, keep) not in self.measured:
            self._check_time()
            if isinstance(self.budget, int) and self.runs >= self.budget:
                raise BudgetSpent
            self.runs += 1
            self.measured[kind, seed, keep] = self._train(kind, keep, seed)[0]
            self._save()
        return self.measured[kind, seed, keep]

    def _train(self, kind: str, keep: Nodes,
               seed: int) -> Tuple[float, Optional[Tuple[int, Dict[str, Any]]]]:
        """Trains from the network's current parameters.

        Args:
            kind: "disturbed" starts with weights changed by up to 2^-12 of their values, which
                measures the difference between two equally good trainings.
            keep: nodes in float32.
            seed: the seed of the order of batches and of the graph's random numbers.

        Returns:
            The mean loss of the second half of the steps, infinite if a loss or a gradient was not
            finite; and the batch and the weights where that was.
        """
        batches, s = self.session.batches, self.settings
        network = self.network(keep) if kind == "low" else self.reference
        network.restore()
        rng = np.random.default_rng(seed)
        order = rng.integers(0, len(batches), s.steps).tolist()
        trained = [p for name, p in self.session.parameters.items()
                   if name in network.arrays and p.grad_req != "null"]
        weights = [network.arrays[p.name].as_nd_ndarray() for p in trained]
        for weight in weights if kind.endswith("disturbed") else ():
            weight[:] = mx.nd.array(
                weight.asnumpy() * (1 + _DISTURBED * rng.uniform(-1, 1, weight.shape)))
        update = mx.optimizer.get_updater(make_optimizer(
            s.optimizer, param_dict=dict(enumerate(trained)), **dict(s.optimizer_params)))
        scale, losses = FIRST_SCALE, []  # type: float, List[float]
        for number, which in enumerate(order):
            ran = network.step(batches[which], scales_down(scale), functools.partial(
                mx.random.seed, 1000 * seed + number))
            if not ran.sound:
                return math.inf, (which, {name: to_float32(array)
                                          for name, array in network.arrays.items()})
            scale = ran.scale
            losses.append(ran.loss)
            update.optimizer.rescale_grad = 1 / (scale * batches[which].data[0].shape[0])
            gradients = [network.arrays[p.name].grad.as_nd_ndarray() for p in trained]
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
                                    sorted(self.reference.keep))).encode())
        for parameter in session.parameters.values():
            made.update(parameter.data().asnumpy().tobytes())
        for batch in session.batches:
            for array in batch.arrays:
                made.update(array.asnumpy().tobytes())
        return made.hexdigest()

    def _load(self) -> None:
        """Loads the file's measurements. The first loss identifies the loss function."""
        self._print = self._fingerprint() if self.file else ""
        if not self.file or not os.path.exists(self.file):
            return
        with open(self.file, encoding="utf-8") as file:
            try:
                held = json.load(file)
                known, loss = held["fingerprint"], float(held["begins_at"])
                measured = {(kind, number, frozenset(nodes)): float(value)
                            for kind, number, nodes, value in held["measured"]}
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"file={self.file!r} was not written by search") from None
        if known != self._print or not math.isclose(loss, self.first_loss, rel_tol=1e-3):
            raise ValueError(f"file={self.file!r} is of another search: the network, its weights, "
                             "the batches, the loss or the settings differ. Use another name")
        self.measured = measured

    def _save(self) -> None:
        if not self.file:
            return
        held = [[kind, i, sorted(nodes), repr(value)]
                for (kind, i, nodes), value in self.measured.items()]
        replace_text(self.file, json.dumps({
            "fingerprint": self._print, "begins_at": self.first_loss, "measured": held}))


def _fidelity(reference: List[Any], found: List[Any]) -> float:
    numbers = sum(g.size for g in reference)
    floor = 1e-4 * sum(float(np.square(g).sum()) for g in reference) / max(numbers, 1)
    noise = [float(np.square(b - a).mean()) / max(float(np.square(a).mean()), floor, 1e-300)
             for a, b in zip(reference, found)]
    return decibels(1.0, float(np.mean(noise))) if noise else math.inf
