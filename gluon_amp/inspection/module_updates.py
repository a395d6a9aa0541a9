"""What a Module's optimizer would add to its parameters: an X-ray makes a Module's steps on copies,
and so its updates, each from the parameters, the masters and the states of now."""
import copy
import math
from typing import Any, Dict, Hashable, List, Tuple

from .._mxnet import mx, np
from ..annotations import Array, Network, Parameter, Updater
from ..cpu.arrays import follow, to_float32
from ..cpu.finite import squares
from ..training.optimizer import master_in
from .modules import bound_module
from .trial import Trial
from .updates import Updates


class ModuleUpdates(Updates):
    """The parameters of a Module, and what its optimizer would add to them; nothing where it has
    none, or where servers have it."""

    def __init__(self, net: Network) -> None:
        super().__init__(net, None)
        self.module = bound_module(net.module)
        self.masters: Dict[str, Any] = {}  # of the last step
        self.updater: Any = None
        if self.module.optimizer_initialized:
            on_store = self.module._update_on_kvstore
            self.updater = (self.module._kvstore if on_store else self.module)._updater

    def look(self, trial: Trial, scale: float) -> None:
        """Counts what would be added by the gradients that a trial has, at this loss scale."""
        if self.updater is None:
            return
        made = [one for one in self._weights() if one[0] in trial.arrays]
        names, indices, weights = zip(*made)
        gradients = [trial.arrays[name].grad.astype(weight.dtype, copy=False)
                     for name, weight in zip(names, weights)]
        updater = self._copied_updater()
        optimizer = updater.optimizer
        for name, index, weight in made:
            master = _master(updater, index, weight)
            if master is not None:
                follow(master, weight)
            self.last[name] = to_float32(weight if master is None else master).asnumpy().copy()
        optimizer.rescale_grad *= self._clipped(gradients, optimizer.rescale_grad / scale) / scale
        updater(list(indices), gradients, list(weights))
        for name, index, weight in made:
            self.masters[name] = _master(updater, index, weight)
        self.count({name: to_float32(weight if self.masters[name] is None else self.masters[name])
                    for name, _, weight in made})

    def _weights(self) -> List[Tuple[str, Any, Any]]:
        """Each parameter that trains: its name, its number for the updater, and a copy."""
        group, devices = self.module._exec_group, len(self.module._context)
        by_name = self.module._update_on_kvstore
        return [(name, name if by_name else i * devices, weights[0].copy())
                for i, (name, weights, gradients) in enumerate(zip(
                    group.param_names, group.param_arrays, group.grad_arrays))
                if gradients[0] is not None]

    def _copied_updater(self) -> Updater:
        made = mx.optimizer.get_updater(copy.deepcopy(self.updater.optimizer))
        fitting = getattr(self.net.module, "_fitting_states", None)  # of a file, until an update
        made.set_states(self.updater.get_states())
        if fitting:
            made.states = copy.deepcopy(fitting[1])
            made.states_synced = dict.fromkeys(made.states, False)
        return made

    def _clipped(self, gradients: List[Any], factor: float) -> float:
        """What `clip_norm` multiplies with gradients that the optimizer gets times a factor."""
        steps = getattr(self.net.module, "_step", None)
        if steps is None or steps.max_norm is None:
            return 1.0
        norm = math.sqrt(float(squares(gradients).sum())) * factor
        return min(steps.max_norm / norm, 1.0) if norm else 1.0

    def _master(self, parameter: Parameter) -> Array:
        return self.masters.get(parameter.name)


def _master(updater: Updater, index: Hashable, weight: Array) -> Array:
    state = updater.states.get(index)
    return master_in(updater.optimizer, state) if weight.dtype is np.float16 else None
