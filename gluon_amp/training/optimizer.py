"""Optimizers with float32 master weights for 16-bit weights.

MXNet's optimizers have them with `multi_precision=True`, but silently revert writes to a weight
between two steps (`set_data`, `load_parameters`). Here master weights are updated by such writes.
On a CPU, where MXNet's 16-bit code is not vectorized, these optimizers use our kernels.

The common ones are fused on a CPU, in one pass over memory: the engine's operator
`_gluon_amp_update` widens weights and gradients, updates the master weights like MXNet's float32
operator, and rounds them, for several weights in one call. LAMB needs norms first, so it takes two
passes. Float32 weights are their own master weights. They get the bits of MXNet's operator, which
is several times slower.
"""
from __future__ import annotations

import copy
import functools
import itertools
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
)

from .._mxnet import mx, np
from ..annotations import Array, Arrays, Optimizer
from ..checks import did_you_mean, same_objects
from ..cpu import library
from ..cpu.arrays import (
    TYPES_16BIT,
    array_type,
    dtype_name,
    is_16bit,
    narrow_all,
    narrowing,
    on_gpu_in_float16,
    sync_master,
    to_float32,
    widen_all,
)
from . import adamw

_GROUP_SIZE = "MXNET_OPTIMIZER_AGGREGATION_SIZE"
_MASTER_LAST = (mx.optimizer.SGD, mx.optimizer.NAG, mx.optimizer.LARS)  # their states' order
# Besides those of FUSED_RULES, optimizers that update weights independently, so that a call may
# have several. (Nadam does not.)
_INDEPENDENT = (mx.optimizer.AdaDelta, mx.optimizer.AdaGrad, mx.optimizer.Adamax, mx.optimizer.FTML,
                mx.optimizer.Ftrl, mx.optimizer.Signum, mx.optimizer.contrib.GroupAdaGrad)
_FUSED_TYPES = [(name, array_type(name)) for name in ("float16", "float32", "bfloat16")]
_TAKE_LISTS = (mx.optimizer.SGD, mx.optimizer.LARS, mx.optimizer.LAMB, adamw.AdamW)
# Optimizers whose states or scale are float32 in MXNet, which it refuses for other weights.
_ONLY_FLOAT32 = (adamw.AdamW, mx.optimizer.RMSProp, mx.optimizer.Ftrl, mx.optimizer.AdaGrad,
                 mx.optimizer.AdaDelta, mx.optimizer.contrib.GroupAdaGrad)

_LEAST_NORM = 1e-30  # in Adamax
_MOST = 45  # weights in one call; the limits of MXNet's operators are 45 to 60
# Settings for which 0 or None in MXNet's optimizers, and -1 in operators, means none.
_NONE_IF_0 = ("clip_gradient", "clip_weights", "lower_bound", "upper_bound")
# Optimizers that count the updates of all weights of a call before they compute learning rates.
_IN_LISTS = (mx.optimizer.SGD, adamw.AdamW)


def _adam(made: Optimizer, lr: float, wd: float, step: int) -> Tuple[float, float]:
    return adamw.bias_corrected(made, lr, step), wd


def _adamw(made: Optimizer, lr: float, wd: float, step: int) -> Tuple[float, float]:
    return adamw.bias_corrected(made, lr, step), lr * wd


class _FusedRule(NamedTuple):
    """The settings of one of MXNet's optimizers in the engine's fused update."""
    rule: str  # the engine's name
    settings: Dict[str, str]  # the operator's name of each -> the optimizer's
    fits: Callable[[Any, Sequence[Any]], bool] = lambda made, states: True
    # from the optimizer's, and the count of updates
    rate_and_decay: Optional[Callable[[Any, float, float, int], Tuple[float, float]]] = None
    stateless: bool = False  # whether states, if any, do not change
    # MXNet's operators on a GPU for float16 weights with master weights, and for float32 weights:
    # they update many in one launch, or `one_by_one`. Without the former, the latter updates the
    # master weights.
    operators: Tuple[str, str] = ("", "")
    one_by_one: bool = False


def _all_there(states: Sequence[Any]) -> bool:
    return all(state is not None for state in states)


_MOMENTUM = {"momentum": "momentum"}
_MOMENTS = {"beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon"}
_RMSPROP = {"beta1": "gamma1", "epsilon": "epsilon", "clip_weights": "clip_weights"}
_BOUNDS = {name: name for name in ("lower_bound", "upper_bound", "bias_correction")}

FUSED_RULES: Dict[Any, List[_FusedRule]] = {
    mx.optimizer.SGD: [
        _FusedRule("sgd", _MOMENTUM,
                   lambda made, states: made.momentum > 0 and _all_there(states),
                   operators=("multi_mp_sgd_mom_update", "multi_sgd_mom_update")),
        _FusedRule("sgd", {}, lambda made, states: made.momentum == 0, stateless=True,
                   operators=("multi_mp_sgd_update", "multi_sgd_update"))],
    mx.optimizer.NAG: [  # MXNet selects the rule by the state, even if the momentum changes later
        _FusedRule("nag", _MOMENTUM,
                   lambda made, states: made.momentum >= 0 and _all_there(states),
                   operators=("mp_nag_mom_update", "nag_mom_update"), one_by_one=True),
        _FusedRule("descent", {}, lambda made, states: all(state is None for state in states),
                   stateless=True, operators=("mp_sgd_update", "sgd_update"), one_by_one=True)],
    mx.optimizer.Adam: [_FusedRule("adam", _MOMENTS, rate_and_decay=_adam,
                                   operators=("", "adam_update"), one_by_one=True)],
    adamw.AdamW: [_FusedRule("adamw", _MOMENTS, rate_and_decay=_adamw,
                             operators=("_multi_mp_adamw_update", "_multi_adamw_update"))],
    mx.optimizer.RMSProp: [
        _FusedRule("rmsprop", _RMSPROP, lambda made, states: not made.centered,
                   operators=("", "rmsprop_update"), one_by_one=True),
        _FusedRule("centered_rmsprop", {**_RMSPROP, "momentum": "gamma2"},
                   lambda made, states: made.centered,
                   operators=("", "rmspropalex_update"), one_by_one=True)],
    mx.optimizer.LAMB: [_FusedRule("lamb", {**_MOMENTS, **_BOUNDS},
                                   operators=("_multi_mp_lamb_update", "_multi_lamb_update"))],
}


def optimizer(name: str, **kwargs: Any) -> Optimizer:
    """Returns an MXNet optimizer with float32 master weights for 16-bit parameters.

    Args:
        name: a name that `gluon.Trainer` takes, such as "sgd" or "adam"; or "adamw".
        kwargs: the optimizer's arguments. `multi_precision=False` omits master weights.

    Raises:
        ValueError: the name is unknown.
    """
    return with_masters(optimizer_class(name)(**{"multi_precision": True, **kwargs}))


def given_optimizer(made: Optimizer) -> Optimizer:
    """Gives a user's optimizer object master weights, in place, and returns it.

    `multi_precision=False` of MXNet's own objects may be the default, so it becomes True. An object
    of `optimizer(name, multi_precision=False)` keeps it.
    """
    if not isinstance(made, _WithMasters) and not _has_own_masters(type(made)):
        made.multi_precision = True
    return with_masters(made)


def optimizer_class(name: object) -> type:
    """Returns MXNet's class of that name, or raises an error that lists the names."""
    registry = mx.optimizer.Optimizer.opt_registry
    cls = registry.get(name.lower()) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"unknown optimizer. Valid: {', '.join(sorted(registry))}. "
                         f"Received: {name!r}{did_you_mean(str(name), list(registry))}")
    return cls


def with_masters(made: Optimizer) -> Optimizer:
    """Gives an MXNet optimizer master weights, in place, and returns it. A class that manages
    master weights itself does not change."""
    cls: Any = type(made)
    if not isinstance(made, _WithMasters) and not _has_own_masters(cls):
        made.__class__ = _class_with_masters(cls)
        made.weight_types = {}
        made._master_sync, made._prepared = MasterSync(), {}
        made._group()
    return made


def _split(made: Optimizer, states: Sequence[Any]) -> Any:
    """Splits states of 16-bit weights into master weights and the rest; their order depends on the
    optimizer."""
    return zip(*(s[::-1] if isinstance(made, _MASTER_LAST) else s for s in states))


def master_in(made: Optimizer, state: object) -> Optional[Array]:
    """Returns the master weight in the state of a 16-bit weight; None if there is none, or if the
    optimizer stores it differently."""
    if not made.multi_precision or state is None or _has_own_masters(type(made)):
        return None
    (master,), _ = _split(made, [state])
    return master


def weights_unwritten(optimizer: Optimizer) -> ContextManager[None]:
    """Ignores writes to an optimizer's weights during a backward pass; see `MasterSync`."""
    sync = getattr(optimizer, "_master_sync", None)
    return nullcontext() if sync is None else sync.weights_unwritten()


def check_scalable(made: Optimizer) -> None:
    """Refuses optimizers without support for a loss scale: LBSGD, which reads gradients before
    `rescale_grad`, those of a static pair, and Horovod's."""
    scale = getattr(made, "static_loss_scale", None)
    if scale is not None:
        raise ValueError(f"this optimizer is one half of the static pair of {scale:g}, for "
                         "MXNet's own Trainer and Module: it would unscale the gradients twice. "
                         "Give an optimizer of gluon_amp.optimizer, or no loss_scale")
    if issubclass(made if isinstance(made, type) else type(made), mx.optimizer.LBSGD):
        raise ValueError("lbsgd adds up and measures gradients before they are unscaled, so no "
                         "loss scale fits it. Use lars or lamb. Received: lbsgd")
    if type(made).__module__.partition(".")[0] == "horovod":
        raise ValueError("Horovod's DistributedOptimizer sums gradients within the update, which "
                         "this Trainer may skip, so that other ranks would wait: give the plain "
                         "optimizer, and kvstore='horovod'")


def check_rescales(made: Optimizer) -> None:
    """Refuses an optimizer of a user's class that ignores `rescale_grad`, and so the loss scale. A
    copy of it updates two numbers."""
    cls = next(cls for cls in type(made).__mro__ if "update" in vars(cls))
    if is_of_mxnet(cls):
        return

    def updated(gradient: float, rescale_grad: float) -> Any:
        probe = copy.copy(made)
        vars(probe).update(copy.deepcopy({name: value for name, value in vars(made).items()
                                          if name != "param_dict"}))
        probe.param_dict, probe.rescale_grad = {}, rescale_grad
        weight, gradients = mx.nd.array([1, -2]), mx.nd.array([gradient, gradient])
        if mx.util.is_np_array():
            weight, gradients = weight.as_np_ndarray(), gradients.as_np_ndarray()
        probe.update(0, weight, gradients, probe.create_state(0, weight))
        return weight.asnumpy()

    try:
        given, rescaled, smaller = updated(4, 1), updated(4, 0.5), updated(2, 1)
    except Exception:  # of the user's code, which may need weights of other shapes
        return
    if np.array_equal(given, rescaled) and not np.array_equal(given, smaller):
        raise ValueError(f"the optimizer {cls.__name__} ignores rescale_grad, so its updates would "
                         "be multiplied by the loss scale. Valid: gradients times "
                         "self.rescale_grad in its update(), or loss_scale=None")


def is_of_mxnet(cls: type) -> bool:
    """Whether a class is one of MXNet or of this package."""
    return cls.__module__.partition(".")[0] in ("mxnet", "gluon_amp")


def _has_own_masters(cls: type) -> bool:
    ours = {"create_state_multi_precision", "update_multi_precision"}
    return any(ours & set(vars(c)) and not is_of_mxnet(c) for c in cls.__mro__)


class _Decimal(float):
    """A float that is written without an exponent. MXNet parses numbers from text, and parses
    0.00001 correctly but 1e-05 with an error. So scaling by a power of two is exact, down to 1e-9:
    MXNet parses 19 digits."""

    def __str__(self) -> str:
        return f"{float(self):.19f}" if self > 1e-9 else super().__str__()


class MasterSync:
    """Synchronizes master weights with their weights on a GPU without reading them.

    MXNet's engine counts the writes to each array (`library.versions`), without work on the device.
    If only updates have written master weights and weights, each weight is its rounded master
    weight.
    """

    def __init__(self) -> None:
        # arrays and their counts of writes after the last update, by `_key`
        self._counted: Dict[Any, Tuple[Sequence[Any], Any]] = {}

    def sync(self, indices: Sequence[Any], masters: Sequence[Any],
             weights: Sequence[Any]) -> None:
        """Updates master weights before an update if others have written the weights."""
        written = self._written(indices, masters, weights)
        if written is None:  # not counted together
            one_by_one = [self._written(*map(list, zip(one)))
                          for one in zip(indices, masters, weights)]
            written = [one is None or one[0] for one in one_by_one]
        for master, weight, is_written in zip(masters, weights, written):
            if is_written:
                sync_master(master, weight)

    def record(self, indices: Sequence[Any], masters: Sequence[Any],
               weights: Sequence[Any]) -> None:
        """Records the writes so far: master weights and weights agree now."""
        arrays = [*masters, *weights]
        self._counted[self._key(indices, weights)] = arrays, library.versions(arrays)

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

    def _written(self, indices: Sequence[Any], masters: Sequence[Any],
                 weights: Sequence[Any]) -> Optional[List[bool]]:
        """Returns whether each weight or its master weight was written since; None if unknown."""
        arrays = [*masters, *weights]
        before, counts = self._counted.pop(self._key(indices, weights), ((), None))
        if counts is None or not same_objects(before, arrays):
            return None
        written = library.versions(arrays, since=counts)
        assert written is not None  # because `counts` was not None
        counted = library.read(written)
        return [bool(a or b) for a, b in zip(counted, counted[len(weights):])]

    @staticmethod
    def _key(indices: Sequence[Any], weights: Sequence[Any]) -> Hashable:
        return weights[0].ctx, tuple(indices)


class Prepared:
    """The update of weights on a GPU, prepared as far as it does not depend on the overflow check,
    so that the GPU waits little between the check and the update. Arrays are converted to C once.

    Args:
        rule: the optimizer's rule.
        states: the states of the weights, with master weights.
    """

    def __init__(self, made: Optimizer, rule: _FusedRule, indices: Sequence[int],
                 grads: Sequence[Array], weights: Sequence[Array], states: Sequence[Any]) -> None:
        self._arrays, self._inner = [*grads, *weights, *states], made.inner(weights, states)
        self._made, self._rule, self._device = made, rule, weights[0].ctx.device_id
        made._check_types(indices, [dtype_name(weight.dtype) for weight in weights])
        # the indices, master weights and weights in float16
        self._with_masters: Tuple[List[int], List[Array], List[Array]] = [], [], []
        for index, weight, state in zip(indices, weights, states):
            if is_16bit(weight.dtype):
                for column, one in zip(self._with_masters,
                                       (index, master_in(made, state), weight)):
                    column.append(one)

    def fits(self, grads: Sequence[Array], weights: Sequence[Array],
             states: Sequence[Any]) -> bool:
        """Whether these are its arrays, and the optimizer has the same rule."""
        return same_objects(self._arrays, [*grads, *weights, *states]) \
            and self._made.rule(self._inner) is self._rule

    def begin(self) -> None:
        """Does what does not depend on the check."""
        if self._with_masters[0]:
            self._made._master_sync.sync(*self._with_masters)
            self._made._master_sync.record(*self._with_masters)  # if the step is skipped

    def run(self) -> None:
        """Updates the weights."""
        made = self._made
        made._set_current_context(self._device)
        made.rescale_grad = _Decimal(made.rescale_grad)
        self._update()
        if self._with_masters[0]:
            made._master_sync.record(*self._with_masters)

    def _update(self) -> None:
        raise NotImplementedError


class Launches(Prepared):
    """An update by operators that update many weights in one launch."""

    def __init__(self, made: Optimizer, rule: _FusedRule, indices: Sequence[int],
                 grads: Sequence[Array], weights: Sequence[Array], states: Sequence[Any]) -> None:
        super().__init__(made, rule, indices, grads, weights, states)
        # AdamW's operators read it from the GPU
        self._rescale_grad = mx.nd.zeros(1, weights[0].ctx) if rule.rule == "adamw" else None
        self._last_rescale_grad: Optional[float] = None
        self._launches: List[Tuple[str, List[int]]] = []  # the operator and indices of each
        self._attributes: Dict[Any, library.Attributes] = {}  # in the last update
        rows: Dict[str, List[Any]] = {}
        for index, grad, weight, state, inner in zip(indices, grads, weights, states, self._inner):
            row = [weight, grad, *_arrays_in(rule, inner)]
            name = rule.operators[1]
            if is_16bit(weight.dtype):
                name = rule.operators[0]
                row.append(master_in(made, state))
            rows.setdefault(name, []).append((index, weight, row))
        also = [] if self._rescale_grad is None else [self._rescale_grad]
        calls = []
        for name, of_type in rows.items():
            for i in range(0, len(of_type), made.aggregate_num):
                numbers, out, inputs = zip(*of_type[i:i + made.aggregate_num])
                self._launches.append((name, list(numbers)))
                calls.append((name, [*itertools.chain(*inputs), *also], out))
        self._calls = library.Calls(calls)

    def _update(self) -> None:
        made, rule = self._made, self._rule
        settings = made.settings(rule)
        if self._rescale_grad is not None:
            scale = settings.pop("rescale_grad")
            if scale != self._last_rescale_grad:
                self._rescale_grad[:] = np.array([scale], "float32")
                self._last_rescale_grad = scale
        before, self._attributes = self._attributes, {}
        attributes = []
        for name, indices in self._launches:
            lrs, wds, steps = map(tuple, made.rates(rule, indices))
            counts = steps if rule.rule == "lamb" else ()
            key = name, lrs, wds, counts, *settings.values()
            self._attributes[key] = before.get(key) or self._parse(name, lrs, wds, counts, settings)
            attributes.append(self._attributes[key])
        self._calls.run(attributes)

    def _parse(self, name: str, lrs: Tuple[float, ...], wds: Tuple[float, ...],
               counts: Tuple[int, ...], settings: Dict[str, Any]) -> library.Attributes:
        """Returns the attributes of a launch."""
        rates, decays, rule = _text(lrs), _text(wds), self._rule.rule
        if rule == "lamb":
            return library.Attributes(name, num_tensors=len(lrs), learning_rates=f"[{rates}]",
                                      wds=f"[{decays}]", step_count=f"[{_text(counts)}]",
                                      **settings)
        etas = {"etas": [1.0] * len(lrs)} if rule == "adamw" else {}
        return library.Attributes(name, num_weights=len(lrs), lrs=f"[{rates}]", wds=f"[{decays}]",
                                  **etas, **settings)


class OneByOne(Prepared):
    """An update by operators that update one weight in a launch. If they are float32 operators,
    float16 gradients are widened before the check is read."""

    def __init__(self, made: Optimizer, rule: _FusedRule, indices: Sequence[int],
                 grads: Sequence[Array], weights: Sequence[Array], states: Sequence[Any]) -> None:
        super().__init__(made, rule, indices, grads, weights, states)
        mixed, plain = rule.operators
        calls: List[Tuple[int, str, List[Array], List[Array]]] = []
        self._widened: List[Tuple[int, Array, Array, List[Array]]] = []
        for index, grad, weight, state, inner in zip(indices, grads, weights, states, self._inner):
            arrays = _arrays_in(rule, inner)
            if not is_16bit(weight.dtype):
                calls.append((index, plain, [weight, grad, *arrays], [weight]))
            elif mixed:
                calls.append((index, mixed, [weight, grad, *arrays, master_in(made, state)],
                              [weight]))
            else:
                self._widened.append((index, grad, master_in(made, state), arrays))
        self._calls = library.Calls([(name, inputs, out) for _, name, inputs, out in calls])
        self._of_widened = library.Calls([])  # of this step
        self._narrow = narrowing(*self._with_masters[1:]) if self._widened else None
        self._indices = [index for index, *_ in (*calls, *self._widened)]
        self._names = [*(name for _, name, *_ in calls), *[plain] * len(self._widened)]

    def begin(self) -> None:
        super().begin()
        self._of_widened = library.Calls([])
        if self._widened:
            wide = widen_all([grad for _, grad, *_ in self._widened])
            self._of_widened = library.Calls([
                (self._rule.operators[1], [master, grad, *arrays], [master])
                for grad, (_, _, master, arrays) in zip(wide, self._widened)])

    def _update(self) -> None:
        made, rule = self._made, self._rule
        settings = {its: getattr(made, its) for its in rule.settings.values()}
        settings = made.without_none({**settings, "clip_gradient": made.clip_gradient,
                                      "rescale_grad": made.rescale_grad})
        lrs, wds, _ = made.rates(rule, self._indices)
        columns = list(zip(self._names, lrs, wds))
        parsed = {(name, lr, wd): library.Attributes(name, lr=lr, wd=wd, **settings)
                  for name, lr, wd in set(columns)}
        attributes, widened = [parsed[one] for one in columns], len(self._widened)
        self._calls.run(attributes[:len(attributes) - widened])
        if self._narrow is not None:
            self._of_widened.run(attributes[-widened:])
            self._narrow()
            self._of_widened = library.Calls([])  # frees the widened gradients


def _arrays_in(rule: _FusedRule, inner: Any) -> List[Array]:
    """Returns the arrays of a state without its master weight."""
    if rule.stateless:
        return []
    return [inner] if isinstance(inner, mx.nd.NDArray) else list(inner)


def prepared(updater: Any, indices: Sequence[int], grads: Sequence[Array],
             weights: Sequence[Array]) -> Callable[[], None]:
    """Prepares an update of weights on one device, as far as it does not depend on the overflow
    check. Returns the function that updates."""
    made, device = updater.optimizer, weights[0].ctx
    if device.device_type != "gpu" or not isinstance(made, _WithMasters) \
            or made._base() not in FUSED_RULES:
        return functools.partial(updater, indices, grads, weights)
    for index, weight in zip(indices, weights):
        if index not in updater.states:
            updater.states[index] = made.create_state_multi_precision(index,
                                                                      weight.as_nd_ndarray())
            updater.states_synced[index] = True
    states = [updater.states[index] for index in indices]
    found = made._prepared.get(device)
    if found is None or not found.fits(grads, weights, states):
        rule = made.prepared_rule(grads, weights, states)
        if rule is None or not all(updater.states_synced[index] for index in indices):
            return functools.partial(updater, indices, grads, weights)
        cls = OneByOne if rule.one_by_one else Launches
        found = made._prepared[device] = cls(made, rule, indices, grads, weights, states)
    found.begin()
    return found.run


class _WithMasters:
    """The mixin that precedes an optimizer's class."""

    # names by index, when the state was created
    weight_types: Dict[Any, Any]
    _master_sync: MasterSync
    _prepared: Dict[Any, Prepared]  # by device

    def _group(self) -> None:
        """Sets the number of weights in one call, also if MXNet's optimizer supports one only."""
        if isinstance(self, mx.optimizer.SGD) or self._base() in (*FUSED_RULES, *_INDEPENDENT):
            self.aggregate_num = min(_MOST, int(os.environ.get(_GROUP_SIZE, _MOST)))

    def create_state_multi_precision(self, index: adamw.Index, weight: Array) -> object:
        dtype = self.weight_types[index] = dtype_name(weight.dtype)
        if dtype == "float64" and isinstance(self, _ONLY_FLOAT32):
            name = getattr(self.param_dict.get(index), "name", index)
            raise ValueError(f"{self._base().__name__} updates float32 and 16-bit parameters only. "
                             "Valid: net.cast('float32'), or another optimizer, such as sgd or "
                             f"adam. Received: float64 parameter {name}")
        if dtype in TYPES_16BIT and not self.multi_precision:
            self._check_without_masters(dtype)
        if dtype == "bfloat16" and self.multi_precision:  # MXNet supports float16 only
            master = to_float32(weight)
            both = master, self.create_state(index, master)
            return both[::-1] if isinstance(self, _MASTER_LAST) else both
        state = super().create_state_multi_precision(index, weight)
        if dtype == "float16" and weight.ctx.device_type == "gpu":
            master = master_in(self, state)
            if master is not None:
                self._master_sync.record([index], [master], [weight])
        return state

    def _check_without_masters(self, dtype: str) -> None:
        epsilon = getattr(self, "epsilon", None)
        if isinstance(self, _ONLY_FLOAT32):
            why = f"updates {dtype} weights with master weights only"
        elif dtype == "float16" and epsilon and np.float16(epsilon) == 0:
            why = f"would divide by 0: without master weights its state is float16, where " \
                  f"epsilon={epsilon:g} is 0. Valid: an epsilon of at least 6e-8, such as 1e-4"
        elif isinstance(self, mx.optimizer.Adamax):
            why = "would divide by 0 where a gradient is 0 in the type of the state"
        else:
            return
        raise ValueError(f"{self._base().__name__} {why}. Leave multi_precision at True. "
                         "Received: multi_precision=False")

    def update_multi_precision(self, index: adamw.Indices, weight: Arrays, grad: Arrays,
                               state: Any) -> None:
        """Updates a weight or a list of them: on a CPU with fused updates if available, otherwise
        like MXNet, with master weights for 16-bit weights."""
        several = isinstance(index, (tuple, list))
        if several:
            indices, weights, grads, states = map(list, (index, weight, grad, state))
        else:
            indices, weights, grads, states = [index], [weight], [grad], [state]
        # One check of all arrays is faster than reading the type of each.
        one_type = next((name for name, dtype in _FUSED_TYPES
                         if library.on_one_cpu([*weights, *grads], dtype)), None) \
            if self._base() in FUSED_RULES else None
        types = [one_type or dtype_name(one.dtype) for one in weights]
        self._check_types(indices, types)
        if type(self.rescale_grad) is not _Decimal:
            self.rescale_grad = _Decimal(self.rescale_grad)
        # MXNet's Updater passes weights of one type; their gradients may have another
        has_masters = self.multi_precision and types[0] in TYPES_16BIT
        if (has_masters or types[0] == "float32") and one_type is not None \
                and self._update_fused(indices, weights, grads, states, several, has_masters):
            return
        if isinstance(self, mx.optimizer.Adamax):  # it divides 0 by 0 until a gradient is not 0
            for _, norm in list(_split(self, states))[1] if has_masters else states:
                classic = norm.as_nd_ndarray()
                classic[:] = mx.nd.maximum(classic, _LEAST_NORM)
        if isinstance(self, mx.optimizer.AdaDelta):  # it writes to gradients
            grads = [g.copy() for g in grads]
        if has_masters:
            self._update_masters(indices, weights, grads, states)
        else:
            self._each(super().update_multi_precision, indices, weights, grads, states)

    def _update_masters(self, indices: List[Any], weights: List[Array], grads: List[Array],
                        states: List[Any]) -> None:
        """Synchronizes master weights with writes to weights, updates them with MXNet's operators,
        and rounds them to weights."""
        masters, inner = _split(self, states)
        on_gpu = weights[0].ctx.device_type == "gpu"
        if on_gpu:
            self._master_sync.sync(indices, masters, weights)
        else:
            for master, weight in zip(masters, weights):
                sync_master(master, weight)
        if on_gpu_in_float16(grads) and self._has_mixed_operators():
            self._each(super().update_multi_precision, indices, weights, grads, states)
        else:  # MXNet's float32 update
            self._each(self.update, indices, masters, widen_all(grads), inner)
            narrow_all(masters, weights)
        if on_gpu:
            self._master_sync.record(indices, masters, weights)

    def _each(self, update: Callable[..., Any], *columns: Sequence[Any]) -> None:
        """Updates weights in one call if MXNet's optimizer supports lists, or else one by one."""
        if isinstance(self, _TAKE_LISTS) and len(columns[0]) > 1:
            update(*map(list, columns))
            return
        with mx.engine.bulk(len(columns[0])):  # avoids synchronization after each on a GPU
            for one in zip(*columns):
                update(*one)

    def _has_mixed_operators(self) -> bool:
        """Whether MXNet's optimizer has operators that read float16 and update master weights."""
        mixed = self._base().update_multi_precision
        return mixed is not mx.optimizer.Optimizer.update_multi_precision

    def _update_fused(self, indices: Sequence[int], weights: Sequence[Array],
                      grads: Sequence[Array], states: Sequence[Any], several: bool,
                      has_masters: bool) -> bool:
        """Updates weights, master weights, states and counts in one fused call, if the optimizer
        supports it; returns whether it did. Float32 weights have no master weights."""
        masters, inner = _split(self, states) if has_masters else ((), states)
        # MXNet's LAMB sums norms in another order when it updates weights one by one
        if isinstance(self, mx.optimizer.LAMB) and not (several and self.aggregate_num > 1):
            return False
        fused = self.rule(inner)
        if fused is None:
            return False
        lrs, wds, steps = self.rates(fused, indices)
        kept = () if fused.stateless else \
            zip(*([state] if isinstance(state, mx.nd.NDArray) else state for state in inner))
        library.call("_gluon_amp_update",
                     [*weights, *grads, *masters, *(array for column in kept for array in column)],
                     out=list(weights), rule=fused.rule, num_weights=len(weights),
                     lrs=_text(tuple(lrs)), wds=_text(tuple(wds)), steps=_text(tuple(steps)),
                     masters=bool(masters), **self.settings(fused))
        return True

    def rule(self, states: Sequence[Any]) -> Optional[_FusedRule]:
        """Returns the fused rule that fits states without master weights."""
        rules = FUSED_RULES.get(self._base(), ())
        return next((rule for rule in rules if rule.fits(self, states)), None)

    def inner(self, weights: Sequence[Array], states: Sequence[Any]) -> List[Any]:
        """Returns states without master weights."""
        return [list(_split(self, [state]))[1][0] if is_16bit(weight.dtype) else state
                for weight, state in zip(weights, states)]

    def prepared_rule(self, grads: Sequence[Array], weights: Sequence[Array],
                      states: Sequence[Any]) -> Optional[_FusedRule]:
        """Returns the rule of a prepared update of weights on a GPU; None if there is none."""
        arrays, device = [*grads, *weights], weights[0].ctx
        types = [dtype_name(array.dtype) for array in arrays]
        if not all(a.stype == "default" and a.ctx == device for a in arrays) \
                or types[:len(grads)] != types[len(grads):] \
                or not set(types) <= {"float32", "float16" if self.multi_precision else "float32"} \
                or (isinstance(self, mx.optimizer.LAMB) and self.aggregate_num == 1):
            return None
        return self.rule(self.inner(weights, states))

    def rates(self, rule: _FusedRule, indices: Sequence[int]
              ) -> Tuple[Sequence[float], Sequence[float], Sequence[int]]:
        """Counts an update. Returns the learning rate, weight decay and count of each weight."""
        lrs: List[float] = []
        wds: List[float] = []
        for part in [indices] if isinstance(self, _IN_LISTS) else [[index] for index in indices]:
            self._update_count(part)
            lrs += self._get_lrs(part)
            wds += self._get_wds(part)
        steps = [self._index_update_count[index] for index in indices]
        if rule.rate_and_decay is not None:
            both = [rule.rate_and_decay(self, *numbers) for numbers in zip(lrs, wds, steps)]
            lrs, wds = [lr for lr, _ in both], [wd for _, wd in both]
        return lrs, wds, steps

    def settings(self, rule: _FusedRule) -> Dict[str, Any]:
        """Returns the other attributes of an operator that updates."""
        settings = {name: getattr(self, its) for name, its in rule.settings.items()}
        settings.update(clip_gradient=self.clip_gradient, rescale_grad=self.rescale_grad)
        return self.without_none(settings)

    @staticmethod
    def without_none(settings: Dict[str, Any]) -> Dict[str, Any]:
        """Returns the settings with the operators' number for none."""
        return {name: value or -1 if name in _NONE_IF_0 else value
                for name, value in settings.items()}

    def _check_types(self, indices: List[Any], types: List[str]) -> None:
        for index, now in zip(indices, types):
            then = self.weight_types.setdefault(index, now)
            if now != then:
                name = getattr(self.param_dict.get(index), "name", index)
                raise ValueError(f"parameter {name} was {then} when its optimizer "
                                 f"state was made and is {now} now: make a new "
                                 "Trainer, with a new optimizer, after a cast")

    def _base(self) -> type:
        return type(self).__bases__[1]

    def __reduce__(self) -> Any:  # the class is created at run time; pickle finds it by its base
        return _revive, (self._base(),), self.__getstate__()

    def __getstate__(self) -> Any:
        state = super().__getstate__()
        state.pop("_master_sync", None)
        state.pop("_prepared", None)
        return state

    def __setstate__(self, state: object) -> None:
        super().__setstate__(state)
        self._master_sync, self._prepared = MasterSync(), {}
        self._group()  # an Updater would loop forever with the 0 of an older file


@functools.lru_cache(maxsize=None)
def _class_with_masters(cls: type) -> Any:
    return type(cls.__name__, (_WithMasters, cls),
                {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _revive(cls: type) -> Optimizer:
    made = _class_with_masters(cls)
    return made.__new__(made)


@functools.lru_cache(maxsize=32)
def _text(numbers: Tuple[float, ...]) -> str:
    return ",".join(map(str, numbers))
