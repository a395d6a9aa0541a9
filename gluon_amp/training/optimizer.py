"""Optimizers with float32 master weights for 16-bit weights.

MXNet's optimizers have them with `multi_precision=True`, but silently revert writes to a weight
between two steps (`set_data`, `load_parameters`). Here master weights are updated by such writes.

There are two ways to update:

    fused      the rules of `ROWS`: on a CPU one call of the engine's operator, in one pass over
               memory; on a GPU launches of MXNet's operators that are prepared once
    MXNet's    gradients are widened, MXNet's float32 update is applied to master weights, and these
               are rounded

Float32 weights are their own master weights. Both ways have the bits of MXNet's float32 update.
"""
from __future__ import annotations

import copy
import functools
import itertools
import math
import os
from contextlib import contextmanager, nullcontext
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Hashable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from .._mxnet import mx, np
from ..annotations import Array, Arrays, Optimizer, Updater
from ..checks import did_you_mean, same_objects
from ..cpu import library
from ..cpu.arrays import (
    TYPES_16BIT,
    array_type,
    dtype_name,
    is_16bit,
    narrow_all,
    narrowing,
    sync_master,
    widen_all,
)
from .adamw import AdamW, Index, bias_corrected

_GROUP_SIZE = "MXNET_OPTIMIZER_AGGREGATION_SIZE"
_MOST = 45  # weights in one call; the limits of MXNet's operators are 45 to 60
_LEAST_NORM = 1e-30  # in Adamax
# Settings for which 0 or None in MXNet's optimizers, and -1 in operators, means none.
_NONE_IF_0 = ("clip_gradient", "clip_weights", "lower_bound", "upper_bound")


# ---- what MXNet's optimizers are


class Rule(NamedTuple):
    """A fused update.

    Attributes:
        name: the engine's name.
        operators: MXNet's operators on a GPU, for float16 weights with master weights and for
            float32 weights. Without the former, the latter updates the master weights.
        several: whether these operators update several weights in one launch.
        settings: the names of the optimizer's settings, which its operators have, too.
        fits: whether an optimizer updates these states, without master weights, by the rule.
        rate_and_decay: the operators' learning rate and weight decay, from the optimizer, its
            rate, its decay, and the weight's count of updates.
        stateless: whether states, if any, do not change.
    """
    name: str
    operators: Tuple[str, str]
    several: bool
    settings: Tuple[str, ...]
    fits: Callable[[Any, Sequence[Any]], bool] = lambda optimizer, states: True
    rate_and_decay: Callable[[Any, float, float, int], Tuple[float, float]] = \
        lambda optimizer, rate, decay, step: (rate, decay)
    stateless: bool = False


class Row(NamedTuple):
    """What this package uses of one of MXNet's optimizers.

    Attributes:
        rules: its fused updates.
        master_last: whether the master weight is the last part of a 16-bit weight's state, not the
            first.
        lists: whether its `update` takes lists of weights.
        only_float32: whether it updates float32 weights and master weights alone.
        together: whether it updates weights independently, so that any number may be updated in one
            call.
    """
    rules: Sequence[Rule] = ()
    master_last: bool = False
    lists: bool = False
    only_float32: bool = False
    together: bool = True


def _all_there(states: Sequence[Any]) -> bool:
    return all(state is not None for state in states)


_MOMENTS = ("beta1", "beta2", "epsilon")
_BOUNDS = ("lower_bound", "upper_bound", "bias_correction")
_RMSPROP = ("gamma1", "epsilon", "clip_weights")
_NAMES_IN_ENGINE = {"gamma1": "beta1", "gamma2": "momentum"}

ROWS: Dict[type, Row] = {
    mx.optimizer.SGD: Row([
        Rule("sgd", ("multi_mp_sgd_mom_update", "multi_sgd_mom_update"), True, ("momentum",),
             lambda sgd, states: sgd.momentum > 0 and _all_there(states)),
        Rule("sgd", ("multi_mp_sgd_update", "multi_sgd_update"), True, (),
             lambda sgd, states: sgd.momentum == 0, stateless=True)], master_last=True, lists=True),
    mx.optimizer.NAG: Row([  # which chooses by the state, even if the momentum changes later
        Rule("nag", ("mp_nag_mom_update", "nag_mom_update"), False, ("momentum",),
             lambda nag, states: nag.momentum >= 0 and _all_there(states)),
        Rule("descent", ("mp_sgd_update", "sgd_update"), False, (),
             lambda nag, states: all(state is None for state in states), stateless=True)],
        master_last=True),
    mx.optimizer.Adam: Row([
        Rule("adam", ("", "adam_update"), False, _MOMENTS,
             rate_and_decay=lambda adam, *rates: (bias_corrected(adam, rates[0], rates[2]),
                                                  rates[1]))]),
    AdamW: Row([
        Rule("adamw", ("_multi_mp_adamw_update", "_multi_adamw_update"), True, _MOMENTS,
             rate_and_decay=lambda adamw, *rates: (bias_corrected(adamw, rates[0], rates[2]),
                                                   rates[0] * rates[1]))], only_float32=True),
    mx.optimizer.RMSProp: Row([
        Rule("rmsprop", ("", "rmsprop_update"), False, _RMSPROP,
             lambda rmsprop, states: not rmsprop.centered),
        Rule("centered_rmsprop", ("", "rmspropalex_update"), False,
             (*_RMSPROP, "gamma2"),
             lambda rmsprop, states: rmsprop.centered)], only_float32=True),
    mx.optimizer.LAMB: Row([  # which sums norms in another order if it updates weights singly
        Rule("lamb", ("_multi_mp_lamb_update", "_multi_lamb_update"), True,
             _MOMENTS + _BOUNDS, lambda lamb, states: lamb.aggregate_num > 1)], lists=True),
    mx.optimizer.LARS: Row(master_last=True, lists=True, together=False),
    mx.optimizer.AdaDelta: Row(only_float32=True),
    mx.optimizer.AdaGrad: Row(only_float32=True),
    mx.optimizer.Ftrl: Row(only_float32=True),
    mx.optimizer.contrib.GroupAdaGrad: Row(only_float32=True),
    mx.optimizer.Adamax: Row(),
    mx.optimizer.FTML: Row(),
    mx.optimizer.Signum: Row(),
}


def is_of_mxnet(cls: type) -> bool:
    """Whether a class is one of MXNet or of this package."""
    return cls.__module__.partition(".")[0] in ("mxnet", "gluon_amp")


def _class_of_update(cls: type) -> type:
    """Returns the class that has an optimizer's method `update`."""
    return next(base for base in cls.__mro__ if "update" in vars(base))


def _has_own_masters(cls: type) -> bool:
    methods = {"create_state_multi_precision", "update_multi_precision"}
    return any(methods & set(vars(base)) and not is_of_mxnet(base) for base in cls.__mro__)


@functools.lru_cache(maxsize=None)
def _row_of(cls: type) -> Row:
    """Returns the row of a class. A subclass has its base's states, but updates as MXNet does."""
    if issubclass(cls, _WithMasters):
        cls = cls.__bases__[1]
    base = next((base for base in cls.__mro__ if base in ROWS), None)
    if base is cls:
        return ROWS[cls]
    row = ROWS[base] if base else Row()
    return row._replace(rules=(), together=False,
                        lists=row.lists and is_of_mxnet(_class_of_update(cls)))


# ---- optimizers by name, and of the user


def optimizer(name: str, **kwargs: Any) -> Optimizer:
    """Returns an MXNet optimizer with float32 master weights for 16-bit parameters.

    Args:
        name: a name that `gluon.Trainer` takes, such as "sgd" or "adam"; or "adamw".
        kwargs: the optimizer's arguments. `multi_precision=False` omits master weights.

    Raises:
        ValueError: the name is unknown.
    """
    return with_masters(optimizer_class(name)(**{"multi_precision": True, **kwargs}))


def given_optimizer(optimizer: Optimizer) -> Optimizer:
    """Gives a user's optimizer object master weights, in place, and returns it.

    `multi_precision=False` of MXNet's own objects may be the default, so it becomes True. An object
    of `optimizer(name, multi_precision=False)` keeps it.
    """
    if not isinstance(optimizer, _WithMasters) and not _has_own_masters(type(optimizer)):
        optimizer.multi_precision = True
    return with_masters(optimizer)


def optimizer_class(name: object) -> type:
    """Returns MXNet's class of that name, or raises an error that lists the names."""
    registry = mx.optimizer.Optimizer.opt_registry
    cls = registry.get(name.lower()) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"unknown optimizer. Valid: {', '.join(sorted(registry))}. "
                         f"Received: {name!r}{did_you_mean(str(name), list(registry))}")
    return cls


def with_masters(optimizer: Optimizer) -> Optimizer:
    """Gives an MXNet optimizer master weights, in place, and returns it. A class that manages
    master weights itself does not change."""
    cls: Any = type(optimizer)
    if not isinstance(optimizer, _WithMasters) and not _has_own_masters(cls):
        optimizer.__class__ = _class_with_masters(cls)
        optimizer.weight_types = {}
        optimizer._begin()
    return optimizer


def has_masters(optimizer: Optimizer) -> bool:
    """Whether 16-bit weights have master weights that `master_in` returns."""
    return bool(optimizer.multi_precision) and not _has_own_masters(type(optimizer))


def master_in(optimizer: Optimizer, state: object) -> Optional[Array]:
    """Returns the master weight in the state of a 16-bit weight; None if there is none, or if the
    optimizer stores it differently."""
    return _split(optimizer, state)[0] if has_masters(optimizer) and state is not None else None


def _split(optimizer: Optimizer, state: Any) -> Tuple[Array, Any]:
    """Returns the master weight and the rest of a 16-bit weight's state."""
    cls: Any = type(optimizer)
    master, rest = state[::-1] if _row_of(cls).master_last else state
    return master, rest


def check_scalable(optimizer: Optimizer) -> None:
    """Refuses optimizers without support for a loss scale: LBSGD, which reads gradients before
    `rescale_grad`, those of a static pair, Horovod's, and those that ignore `rescale_grad`."""
    scale = getattr(optimizer, "static_loss_scale", None)
    if scale is not None:
        raise ValueError(f"this optimizer is one half of the static pair of {scale:g}, for "
                         "MXNet's own Trainer and Module: it would unscale the gradients twice. "
                         "Give an optimizer of gluon_amp.optimizer, or no loss_scale")
    if isinstance(optimizer, mx.optimizer.LBSGD):
        raise ValueError("lbsgd adds up and measures gradients before they are unscaled, so no "
                         "loss scale fits it. Use lars or lamb. Received: lbsgd")
    if type(optimizer).__module__.partition(".")[0] == "horovod":
        raise ValueError("Horovod's DistributedOptimizer sums gradients within the update, which "
                         "this Trainer may skip, so that other ranks would wait: give the plain "
                         "optimizer, and kvstore='horovod'")
    _check_rescales(optimizer)


def _check_rescales(optimizer: Optimizer) -> None:
    """Refuses an optimizer of a user's class that ignores `rescale_grad`, and so the loss scale. A
    copy of it updates two numbers."""
    cls = _class_of_update(type(optimizer))
    if is_of_mxnet(cls):
        return

    def updated(gradient: float, rescale_grad: float) -> Any:
        probe = copy.deepcopy(optimizer)
        probe.rescale_grad = rescale_grad
        weight, gradients = mx.nd.array([1, -2]), mx.nd.array([gradient, gradient])
        if mx.util.is_np_array():
            weight, gradients = weight.as_np_ndarray(), gradients.as_np_ndarray()
        probe.update(0, weight, gradients, probe.create_state(0, weight))
        return weight.asnumpy()

    try:
        first, rescaled, smaller = updated(4, 1), updated(4, 0.5), updated(2, 1)
    except Exception:  # of the user's code, which may need weights of other shapes
        return
    if np.array_equal(first, rescaled) and not np.array_equal(first, smaller):
        raise ValueError(f"the optimizer {cls.__name__} ignores rescale_grad, so its updates would "
                         "be multiplied by the loss scale. Valid: gradients times "
                         "self.rescale_grad in its update(), or loss_scale=None")


# ---- writes to weights on a GPU


class MasterSync:
    """Synchronizes master weights with their weights on a GPU without reading them.

    MXNet's engine counts the writes to each array (`library.versions`), without work on the device.
    If only updates have written master weights and weights, each weight is its rounded master
    weight.
    """

    def __init__(self) -> None:
        # arrays and their counts of writes after the last update, by `_key`
        self._counted: Dict[Hashable, Tuple[Sequence[Any], Any]] = {}

    def sync(self, indices: Sequence[Any], masters: Sequence[Any], weights: Sequence[Any]) -> None:
        """Updates master weights before an update if others have written the weights, and records
        the writes."""
        arrays = [*masters, *weights]
        before, counts = self._counted.get(_key(indices, weights), ((), None))
        writes: Sequence[int] = [1] * len(arrays)  # unknown
        if counts is not None and same_objects(before, arrays):
            writes = library.read(library.versions(arrays, counts))
        for master, weight, *written in zip(masters, weights, writes, writes[len(weights):]):
            if any(written):
                sync_master(master, weight)
        self.record(indices, masters, weights)  # also if the step is skipped

    def record(self, indices: Sequence[Any], masters: Sequence[Any],
               weights: Sequence[Any]) -> None:
        """Records the writes so far: master weights and weights agree now."""
        arrays = [*masters, *weights]
        self._counted[_key(indices, weights)] = arrays, library.versions(arrays)

    @contextmanager
    def weights_unwritten(self) -> Iterator[None]:
        """Ignores writes during a backward pass, which writes no weight: MXNet counts a write in
        some static graphs (SSD's)."""
        before = {key: library.versions(arrays) for key, (arrays, _) in self._counted.items()}
        yield
        for key, start in before.items():
            arrays, counts = self._counted[key]
            meanwhile = library.versions(arrays, since=start)
            if counts is not None and meanwhile is not None:
                self._counted[key] = arrays, counts + meanwhile


def weights_unwritten(optimizer: Optimizer) -> ContextManager[None]:
    """Ignores writes to an optimizer's weights during a backward pass; see `MasterSync`."""
    return optimizer._master_sync.weights_unwritten() if isinstance(optimizer, _WithMasters) \
        else nullcontext()


def _key(indices: Sequence[Any], weights: Sequence[Any]) -> Hashable:
    """Returns the key of weights that are updated together. Each has few: other weights on the
    device with the same first index replace them."""
    return weights[0].ctx, indices[0]


# ---- fused updates on a GPU


class Launches:
    """The fused update of weights on a GPU, by launches of MXNet's operators.

    `begin` does what does not depend on the overflow check, so that the GPU waits little between
    the check and `run`. Arrays are converted to C once.

    Args:
        optimizer: the optimizer.
        rule: its rule for the states.
        states: the states of the weights, with master weights.
    """

    def __init__(self, optimizer: Any, rule: Rule, indices: Sequence[Index],
                 grads: Sequence[Array], weights: Sequence[Array], states: Sequence[Any]) -> None:
        self._optimizer, self._rule, self._device = optimizer, rule, weights[0].ctx.device_id
        self._arrays = [*grads, *weights, *states]
        # AdamW's operators read it from the GPU
        self._rescale_grad = mx.nd.zeros(1, weights[0].ctx) if rule.name == "adamw" else None
        self._last_rescale_grad = ""
        self._attributes: Dict[Any, library.Attributes] = {}  # of the last update
        # the indices, master weights and weights in float16
        self._with_masters: Tuple[List[Index], List[Array], List[Array]] = [], [], []
        # gradients that are widened, master weights, and other arrays
        self._widened: List[Tuple[Array, Array, List[Array]]] = []
        widened: List[Index] = []
        rows: Dict[str, List[Any]] = {}
        for index, grad, weight, state in zip(indices, grads, weights, states):
            operator, master = rule.operators[1], None
            if is_16bit(weight.dtype):
                master, state = _split(optimizer, state)
                operator = rule.operators[0]
                for column, value in zip(self._with_masters, (index, master, weight)):
                    column.append(value)
            arrays = _arrays_in(rule, state)
            if operator:
                inputs = [weight, grad, *arrays, *([] if master is None else [master])]
                rows.setdefault(operator, []).append((index, weight, inputs))
            else:
                widened.append(index)
                self._widened.append((grad, master, arrays))
        # the operator and the indices of each launch
        self._launches: List[Tuple[str, Sequence[Index]]] = []
        calls: List[Tuple[str, List[Array], Sequence[Array]]] = []
        size = optimizer.aggregate_num if rule.several else 1
        also = [] if self._rescale_grad is None else [self._rescale_grad]
        for operator, of_operator in rows.items():
            for i in range(0, len(of_operator), size):
                some, out, columns = zip(*of_operator[i:i + size])
                self._launches.append((operator, some))
                calls.append((operator, [*itertools.chain(*columns), *also], out))
        self._launches += [(rule.operators[1], [index]) for index in widened]
        self._calls = library.Calls(calls)
        self._calls_of_widened = library.Calls([])  # of this step
        self._narrow = narrowing(*self._with_masters[1:]) if widened else None

    def fits(self, rule: Rule, grads: Sequence[Array], weights: Sequence[Array],
             states: Sequence[Any]) -> bool:
        """Whether these are its rule and its arrays."""
        return rule is self._rule and same_objects(self._arrays, [*grads, *weights, *states])

    def begin(self, is_first: bool = False) -> None:
        """Synchronizes master weights, unless the states are new, and widens gradients."""
        if self._with_masters[0]:
            masters = self._optimizer._master_sync
            (masters.record if is_first else masters.sync)(*self._with_masters)
        if self._widened:
            wide = widen_all([grad for grad, *_ in self._widened])
            self._calls_of_widened = library.Calls([
                (self._rule.operators[1], [master, grad, *arrays], [master])
                for grad, (_, master, arrays) in zip(wide, self._widened)])

    def run(self) -> None:
        """Updates the weights."""
        optimizer = self._optimizer
        optimizer._set_current_context(self._device)
        settings = optimizer._settings(self._rule)
        if self._rescale_grad is not None:
            rescale_grad = settings.pop("rescale_grad")
            if rescale_grad != self._last_rescale_grad:
                self._rescale_grad[:] = np.array([rescale_grad], "float32")
                self._last_rescale_grad = rescale_grad
        before, self._attributes = self._attributes, {}
        attributes = [self._attributes_of(operator, indices, settings, before)
                      for operator, indices in self._launches]
        at = len(attributes) - len(self._widened)
        self._calls.run(attributes[:at])
        if self._narrow is not None:
            self._calls_of_widened.run(attributes[at:])
            self._narrow()
            self._calls_of_widened = library.Calls([])  # frees the widened gradients
        if self._with_masters[0]:
            self._optimizer._master_sync.record(*self._with_masters)

    def _attributes_of(self, operator: str, indices: Sequence[Index], settings: Dict[str, Any],
                       before: Dict[Any, library.Attributes]) -> library.Attributes:
        """Returns the attributes of a launch, which counts an update of its weights."""
        lrs, wds, steps = self._optimizer._rates(self._rule, indices)
        count = len(indices)
        rates: Dict[str, Any] = {"num_weights": count, "lrs": lrs, "wds": wds}
        if not self._rule.several:
            rates = {"lr": lrs[0], "wd": wds[0]}
        elif self._rule.name == "lamb":
            rates = {"num_tensors": count, "learning_rates": lrs, "wds": wds, "step_count": steps}
        elif self._rule.name == "adamw":
            rates["etas"] = [1.0] * count
        key = operator, str(rates), str(settings)
        if key not in self._attributes:
            self._attributes[key] = before.get(key) or library.Attributes(operator, **rates,
                                                                          **settings)
        return self._attributes[key]


def _arrays_in(rule: Rule, state: Any) -> List[Array]:
    """Returns the arrays that a rule updates, of a state without its master weight."""
    if rule.stateless:
        return []
    return [state] if isinstance(state, mx.nd.NDArray) else list(state)


def prepared(updaters: Sequence[Updater], gradients: Sequence[Any]) -> Callable[[], None]:
    """Prepares an update, as far as it does not depend on the overflow check. Returns the function
    that updates.

    Args:
        updaters: MXNet's updater of each device, or one for all.
        gradients: the `Gradient`s.
    """
    updates = []
    for device in sorted({gradient.device for gradient in gradients}):
        some = [gradient for gradient in gradients if gradient.device == device]
        updates.append(_prepared(updaters[device % len(updaters)], [g.number for g in some],
                                 [g.array for g in some], [g.weight for g in some]))

    def update() -> None:
        for one in updates:
            one()
    return update


def _prepared(updater: Updater, indices: Sequence[int], grads: Sequence[Array],
              weights: Sequence[Array]) -> Callable[[], None]:
    optimizer, states = updater.optimizer, updater.states
    if isinstance(optimizer, _WithMasters) and optimizer._row.rules \
            and weights[0].ctx.device_type == "gpu":
        new = [pair for pair in zip(indices, weights) if pair[0] not in states]
        for index, weight in new:
            states[index] = optimizer.create_state_multi_precision(index, weight.as_nd_ndarray())
            updater.states_synced[index] = True
        launches = optimizer._launches_of(indices, grads, weights, [states[i] for i in indices])
        if launches is not None and all(updater.states_synced[index] for index in indices):
            launches.begin(is_first=len(new) == len(indices))
            return launches.run
    return functools.partial(updater, indices, grads, weights)


# ---- master weights


class _WithMasters:
    """The mixin that precedes an optimizer's class."""

    # names by index, when the state was created
    weight_types: Dict[Any, str]
    _row: Row
    _master_sync: MasterSync
    _launches: Dict[Hashable, Launches]  # by `_key`

    def _begin(self) -> None:
        """Sets what belongs to this process, also if a file has another number of weights in one
        call."""
        self._master_sync, self._launches = MasterSync(), {}
        if self._row.together:
            self.aggregate_num = min(_MOST, int(os.environ.get(_GROUP_SIZE, _MOST)))

    def create_state_multi_precision(self, index: Index, weight: Array) -> object:
        """Returns a weight's state, with a master weight of 16-bit weights."""
        dtype = self.weight_types[index] = dtype_name(weight.dtype)
        if dtype == "float64" and self._row.only_float32:
            raise ValueError(f"{type(self).__name__} updates float32 and 16-bit parameters only. "
                             "Valid: net.cast('float32'), or another optimizer, such as sgd or "
                             f"adam. Received: float64 parameter {self._name(index)}")
        if dtype in TYPES_16BIT and self.multi_precision:
            master = weight.astype("float32")
            state = master, self.create_state(index, master)
            return state[::-1] if self._row.master_last else state
        if dtype in TYPES_16BIT:
            self._check_without_masters(dtype)
        return super().create_state_multi_precision(index, weight)

    def _check_without_masters(self, dtype: str) -> None:
        epsilon = getattr(self, "epsilon", None)
        if self._row.only_float32:
            why = f"updates {dtype} weights with master weights only"
        elif dtype == "float16" and epsilon and np.float16(epsilon) == 0:
            why = f"would divide by 0: without master weights its state is float16, where " \
                  f"epsilon={epsilon:g} is 0. Valid: an epsilon of at least 6e-8, such as 1e-4"
        elif isinstance(self, mx.optimizer.Adamax):
            why = "would divide by 0 where a gradient is 0 in the type of the state"
        else:
            return
        raise ValueError(f"{type(self).__name__} {why}. Leave multi_precision at True. "
                         "Received: multi_precision=False")

    def update_multi_precision(self, index: Union[Index, Sequence[Index]], weight: Arrays,
                               grad: Arrays, state: Any) -> None:
        """Updates a weight or a list of weights of one type."""
        several = isinstance(index, (tuple, list))
        arguments: List[Any] = [index, weight, grad, state]
        indices, weights, grads, states = ([*argument] if several else [argument]
                                           for argument in arguments)
        if weights[0].ctx.device_type == "gpu":
            launches = self._launches_of(indices, grads, weights, states) if several else None
            if launches is not None:
                launches.begin()
                launches.run()
                return
        dtype = dtype_name(weights[0].dtype)
        self._check_types(indices, [dtype] * len(indices))
        masters: List[Array] = []
        if dtype in TYPES_16BIT and self.multi_precision:
            masters, states = map(list, zip(*(_split(self, state) for state in states)))
        rule = self._rule(states)
        # MXNet's LAMB sums norms in another order if it updates weights singly
        if rule is not None and (masters or dtype == "float32") \
                and (several or rule.name != "lamb") \
                and library.on_one_cpu([*weights, *grads], array_type(dtype)):
            self._update_on_cpu(rule, indices, weights, grads, masters, states)
        else:
            self._update_by_mxnet(indices, weights, grads, masters, states, several)

    def _update_on_cpu(self, rule: Rule, indices: Sequence[Index], weights: Sequence[Array],
                       grads: Sequence[Array], masters: Sequence[Array],
                       states: Sequence[Any]) -> None:
        """Updates weights, master weights and states in one call of the engine."""
        lrs, wds, steps = self._rates(rule, indices)
        columns = zip(*(_arrays_in(rule, state) for state in states))
        settings = {_NAMES_IN_ENGINE.get(name, name): value
                    for name, value in self._settings(rule).items()}
        library.call("_gluon_amp_update",
                     [*weights, *grads, *masters, *itertools.chain(*columns)], out=weights,
                     rule=rule.name, num_weights=len(weights), lrs=lrs, wds=wds, steps=steps,
                     masters=bool(masters), **settings)

    def _update_by_mxnet(self, indices: Sequence[Index], weights: Sequence[Array],
                         grads: Sequence[Array], masters: Sequence[Array], states: Sequence[Any],
                         in_lists: bool) -> None:
        """Updates weights, or their master weights, like MXNet in float32."""
        on_gpu = weights[0].ctx.device_type == "gpu"
        if masters:
            if on_gpu:
                self._master_sync.sync(indices, masters, weights)
            else:
                for master, weight in zip(masters, weights):
                    sync_master(master, weight)
            grads = widen_all(grads)
        rescale_grad, power = self.rescale_grad, 1.0
        if _has_exponent(rescale_grad) and dtype_name(grads[0].dtype) == "float32":
            self.rescale_grad, exponent = math.frexp(rescale_grad)
            power = 2.0 ** exponent
        if power != 1 or isinstance(self, mx.optimizer.AdaDelta):  # which writes to gradients
            grads = [grad * power for grad in grads]
        if isinstance(self, mx.optimizer.Adamax):  # it divides 0 by 0 until a gradient is not 0
            for _, norm in states:
                classic = norm.as_nd_ndarray()
                classic[:] = mx.nd.maximum(classic, _LEAST_NORM)
        try:
            if in_lists and self._row.lists:
                self.update(indices, masters or weights, grads, states)
            else:
                with mx.engine.bulk(len(indices)):  # avoids synchronizations on a GPU
                    for arguments in zip(indices, masters or weights, grads, states):
                        self.update(*arguments)
        finally:
            self.rescale_grad = rescale_grad
        if masters:
            narrow_all(masters, weights)
            if on_gpu:
                self._master_sync.record(indices, masters, weights)

    def _launches_of(self, indices: Sequence[Index], grads: Sequence[Array],
                     weights: Sequence[Array], states: Sequence[Any]) -> Optional[Launches]:
        """Returns the fused update of weights on a GPU; None if there is none."""
        rule = self._rule([_split(self, state)[1]
                           if self.multi_precision and is_16bit(weight.dtype) else state
                           for weight, state in zip(weights, states)])
        key = _key(indices, weights)
        launches = self._launches.get(key)
        if rule is None or launches is not None and launches.fits(rule, grads, weights, states):
            return launches if rule is not None else None
        arrays, device = [*grads, *weights], weights[0].ctx
        types = [dtype_name(array.dtype) for array in arrays]
        if any(array.stype != "default" or array.ctx != device for array in arrays) \
                or types[:len(grads)] != types[len(grads):] \
                or not {"float32", "float16" if self.multi_precision else "float32"} >= set(types):
            return None
        self._check_types(indices, types)
        self._launches[key] = Launches(self, rule, indices, grads, weights, states)
        return self._launches[key]

    def _rule(self, states: Sequence[Any]) -> Optional[Rule]:
        """Returns the fused rule that fits states without master weights."""
        return next((rule for rule in self._row.rules if rule.fits(self, states)), None)

    def _rates(self, rule: Rule, indices: Sequence[Index]
               ) -> Tuple[List[float], List[float], List[int]]:
        """Counts an update. Returns the operators' learning rate and weight decay, and the count,
        of each weight."""
        rates: List[float] = []
        decays: List[float] = []
        # MXNet's SGD counts the updates of all weights before it computes learning rates
        for some in [indices] if isinstance(self, mx.optimizer.SGD) else [[i] for i in indices]:
            self._update_count(some)
            rates += self._get_lrs(some)
            decays += self._get_wds(some)
        steps = [self._index_update_count[index] for index in indices]
        pairs = [rule.rate_and_decay(self, *numbers) for numbers in zip(rates, decays, steps)]
        return [float(rate) for rate, _ in pairs], [float(decay) for _, decay in pairs], steps

    def _settings(self, rule: Rule) -> Dict[str, Any]:
        """Returns the other attributes of an operator that updates."""
        values = {name: getattr(self, name) for name in (*rule.settings, "clip_gradient")}
        settings = {name: value or -1 if name in _NONE_IF_0 else value
                    for name, value in values.items()}
        # MXNet parses 19 digits
        exactly = _has_exponent(self.rescale_grad) and self.rescale_grad > 1e-9
        settings["rescale_grad"] = format(self.rescale_grad, ".19f" if exactly else "")
        return settings

    def _check_types(self, indices: Sequence[Index], types: Sequence[str]) -> None:
        for index, dtype in zip(indices, types):
            before = self.weight_types.setdefault(index, dtype)
            if dtype != before:
                raise ValueError(f"parameter {self._name(index)} was {before} when its optimizer "
                                 f"state was created and is {dtype} now: make a new Trainer, with "
                                 "a new optimizer, after a cast")

    def _name(self, index: Index) -> str:
        return getattr(self.param_dict.get(index), "name", str(index))

    def __reduce__(self) -> Any:  # the class is created at run time; pickle finds it by its base
        return _revive, (type(self).__bases__[1],), self.__getstate__()

    def __getstate__(self) -> Any:
        state = super().__getstate__()
        for name in ("_master_sync", "_launches"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: object) -> None:
        super().__setstate__(state)
        self._begin()


def _has_exponent(number: float) -> bool:
    """Whether MXNet parses a number's text with an error: it parses 0.0001 correctly, but not
    1e-05. So a power of two would not scale exactly."""
    return "e" in str(number)


@functools.lru_cache(maxsize=None)
def _class_with_masters(cls: type) -> Any:
    return type(cls.__name__, (_WithMasters, cls),
                {"__module__": cls.__module__, "__doc__": cls.__doc__, "_row": _row_of(cls)})


def _revive(cls: type) -> Optimizer:
    with_masters = _class_with_masters(cls)
    return with_masters.__new__(with_masters)
