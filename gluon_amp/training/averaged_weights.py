"""`AveragedWeights`: exponential and stochastic averages of master weights."""
from __future__ import annotations

import numbers
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from mxnet import autograd

from .._mxnet import mx
from ..annotations import Array, Parameter
from ..checks import same_objects, whole_number
from ..cpu.arrays import in_launches, is_16bit
from . import masters
from .trainer import Trainer


class AveragedWeights:
    """Averages of a Trainer's weights in float32, which its steps update.

        averaged = gluon_amp.AveragedWeights(trainer, decay=0.999)
        ...                                     # trainer.step(batch_size), as before
        with averaged:                          # the network has the averages
            net.save_parameters("averaged.params", masters=trainer)

    Master weights are averaged, or weights that are their own. The first update copies them.
    Skipped steps do not count. `Trainer.save_states` and `load_states` include the averages.

    In the `with` block the network has the averages, rounded to its types, and
    `Trainer.master` returns them in full. Moving averages of batch norms are those of the training;
    what predictions in training mode make of them there is undone at its end, like the weights.

    Args:
        trainer: a `gluon_amp.Trainer`.
        decay: the decay of an exponential moving average, such as 0.999. None: the mean of all
            weights since the creation (stochastic weight averaging).
        every: the number of the Trainer's updates between two updates of the averages.

    Attributes:
        updates: the number of the Trainer's updates since the creation.
        count: the number of weights that have been averaged.

    Raises:
        ValueError: `decay` is not between 0 and 1, a parameter is sparse, or the Trainer does not
            have its master weights.
    """

    def __init__(self, trainer: Trainer, decay: Optional[float] = None, every: int = 1) -> None:
        """See the class for the arguments."""
        if not isinstance(trainer, Trainer):
            raise TypeError("AveragedWeights takes a gluon_amp.Trainer. Received: "
                            f"{type(trainer).__module__}.{type(trainer).__name__}")
        number: Any = decay  # mypy takes no float for a Real
        if number is not None and not (isinstance(number, numbers.Real) and 0 < float(number) < 1):
            raise ValueError("decay must be a number between 0 and 1, or None. Received: "
                             f"{decay!r}")
        sparse = [p.name for p in trainer._params if p._stype != "default"]
        if sparse:
            raise ValueError(f"AveragedWeights takes dense parameters. Received sparse: {sparse}")
        for parameter in trainer._params:
            if is_16bit(parameter.dtype) and parameter.grad_req != "null":
                masters.check(trainer, parameter)
        self.trainer = trainer
        self.decay = None if decay is None else float(decay)
        self.every = whole_number(every, "every", 1)
        self.updates = self.count = 0  # of the Trainer, and of the averages
        self._averages: Dict[int, Any] = {}  # by the numbers of parameters in the Trainer
        self._counts: Dict[int, int] = {}  # of each parameter's updates, after the last step
        # in the `with` block, arrays of the training and their values
        self._before: Optional[List[Tuple[Any, Any]]] = None
        # parameters, their arrays, and the values of their master weights
        self._lists: List[Tuple[Parameter, List[Any], List[Any]]] = []
        trainer._averaged.append(self)

    def value(self, parameter: Parameter) -> Array:
        """Returns the average of a parameter as a float32 array.

        It returns the current value of a parameter that is not averaged: before any update, or
        without gradients, such as `running_mean` of a batch norm.
        """
        value = self.trainer.master(parameter)  # which raises if the Trainer lacks the parameter
        average = self._averages.get(self.trainer._param2idx[parameter.name])
        if average is not None:
            average.copyto(value.as_nd_ndarray())
        return value

    def _note_update(self) -> None:
        """Counts an update of the Trainer, and averages if it is due."""
        self.updates += 1
        counts = self.trainer._optimizer._all_index_update_counts
        before, self._counts = self._counts, dict(
            counts.get(self.trainer._contexts[0].device_id, ()))
        if self.updates % self.every:
            return
        share = 1 / (self.count + 1) if self.decay is None or not self.count else 1 - self.decay
        new = [(i, array, self._averages.get(i)) for i, array in self._weights(before)]
        for i, array, average in new:
            if average is None:
                self._averages[i] = array.copy()
        pairs = [(average, array) for _, array, average in new if average is not None]
        for dtype in sorted({str(average.dtype) for average, _ in pairs}):
            _blend([pair for pair in pairs if str(pair[0].dtype) == dtype], share)
        self.count += 1

    def _weights(self, before: Dict[int, int]) -> Iterator[Tuple[int, Any]]:
        """Yields numbers and float32 weights, on the first device, of parameters that are trained
        or have been. Those that the last step has not updated may have been written since."""
        for i, parameter in enumerate(self.trainer._params):
            if parameter.grad_req != "null" or i in self._averages:
                updated = parameter.grad_req != "null" and self._counts.get(i) != before.get(i)
                weight = masters.live(self.trainer, parameter)[0] if updated \
                    else masters.read(self.trainer, parameter)
                yield i, weight.as_nd_ndarray()

    @property
    def _applied(self) -> bool:
        """Whether the network has the averages, in the `with` block."""
        return self._before is not None

    def __enter__(self) -> AveragedWeights:
        self.trainer._check_own_weights("a second `with` block")
        if autograd.is_recording():
            raise RuntimeError("The `with` block of AveragedWeights begins in autograd.record(), "
                               "where weights cannot be written. Valid: the block around record()")
        parameters = [p for p in self.trainer._params if p._data is not None]
        arrays = {id(array): array for p in parameters
                  for array in [*p.list_data(), *masters.live(self.trainer, p)]}
        copies = {key: array.copy() for key, array in arrays.items()}
        try:
            self._before = [(array, copies[key]) for key, array in arrays.items()]
            self._lists = [(p, p.list_data(), [copies[id(a)] for a in
                                               masters.live(self.trainer, p)]) for p in parameters]
            for i, average in self._averages.items():
                masters.write(self.trainer, self.trainer._params[i], average)
        except BaseException:  # also KeyboardInterrupt
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for array, before in self._before or ():
            before.copyto(array)
        for parameter, arrays, values in self._lists:
            if not same_objects(parameter.list_data(), arrays):  # cast or moved in the block
                for i, array in enumerate(parameter.list_data()):
                    values[min(i, len(values) - 1)].astype(array.dtype).copyto(array)
        self._before, self._lists = None, []

    # ---- files

    def _state(self) -> Dict[str, Any]:
        """Returns the state for files."""
        return {"decay": self.decay, "every": self.every, "updates": self.updates,
                "count": self.count, "averages": dict(self._averages)}

    def _check(self, state: Dict[str, Any]) -> None:
        """Refuses a state of other averages."""
        mine = {"decay": self.decay, "every": self.every}
        saved = {name: state.get(name) for name in mine}
        if saved != mine:
            raise ValueError(f"it holds averaged weights with {saved}. Received: {mine}")
        for name in ("updates", "count"):
            whole_number(state.get(name), name, 0)
        for i, array in state["averages"].items():
            if not (isinstance(i, int) and 0 <= i < len(self.trainer._params)):
                raise ValueError(f"it holds the average of parameter number {i!r:.20}")
            parameter = self.trainer._params[i]
            shape = tuple(n for n in parameter.shape or () if n > 0)
            if not isinstance(array, mx.nd.NDArray) or is_16bit(array.dtype) \
                    or len(shape) == len(array.shape) and shape != array.shape:
                raise ValueError(f"it holds another average than of {parameter.name}, {shape}")

    def _load(self, state: Optional[Dict[str, Any]]) -> None:
        """Loads a state that `_check` accepts; None restarts."""
        state = state or {"updates": 0, "count": 0, "averages": {}}
        self.updates, self.count = state["updates"], state["count"]
        self._averages = {
            i: array.as_nd_ndarray().as_in_context(self.trainer._params[i].list_ctx()[0])
            for i, array in state["averages"].items()}


def _blend(pairs: Sequence[Tuple[Any, Any]], share: float) -> None:
    """Adds a share of each array to its average: average = (1 - share) * average + share * array.
    """
    for some in in_launches(pairs):
        # by the only operator of MXNet that reads and writes many arrays in one launch
        mx.nd.multi_sgd_update(*(array for pair in some for array in pair), num_weights=len(some),
                               lrs=[share] * len(some), wds=[1.0] * len(some), rescale_grad=-1.0,
                               out=[average for average, _ in some])
