"""16-bit parameters of converted blocks: casts, initialization, files, sharing and copies."""
import json
import logging
import weakref
from typing import Any, Dict, Optional, Sequence

from .._mxnet import mx, np, replace
from ..annotations import Array, Context, Parameter
from ..cpu.arrays import (
    TYPES_16BIT,
    beyond_float16,
    dtype_name,
    is_16bit,
    mean_on_cpu,
    on_device,
    small_in_float16,
    to_16bit,
    to_float32,
)
from ..cpu.bfloat16 import is_bfloat16
from ..formats import FLOAT16, Format
from ..graph.graph import Graph
from ..graph.operators import norm_variables

log = logging.getLogger("gluon_amp")


class ConvertedParameter(mx.gluon.Parameter):
    """A 16-bit parameter, with the random initial values of a float32 network.

    It is saved as float32, and loaded from float32 or 16-bit files. New blocks may share it.

    Attributes:
        was_small: whether its float32 values were too small for float16, for an X-ray.
    """

    was_small = False

    _dtype: Any
    _rounded_to: Optional[Any] = None  # its type, while its initial values are float32

    def _reduce(self) -> Array:
        return mean_on_cpu(self.list_data())

    def _finish_deferred_init(self) -> None:
        self._rounded_to, self._dtype = self._dtype, "float32"
        try:
            super()._finish_deferred_init()
        finally:
            self._rounded_to, self._dtype = None, self._rounded_to

    def _init_impl(self, data: Array, ctx_list: Sequence[Context]) -> None:
        self._tell_if_small(data)
        super()._init_impl(_in_type(data, dtype_name(self._rounded_to or self._dtype)), ctx_list)

    def _load_init(self, data: Array, ctx: Context, cast_dtype: bool = True,
                   dtype_source: str = "current") -> None:
        self._check_range(data)
        self._tell_if_small(data)
        super()._load_init(data, ctx, True, "current")

    def set_data(self, data: Array) -> None:
        self._check_range(data)
        super().set_data(data)

    def _tell_if_small(self, data: Array) -> None:
        is_float16 = dtype_name(self._rounded_to or self._dtype) == "float16"
        if is_float16 and dtype_name(data.dtype) == "float32":
            self.was_small = bool(small_in_float16({self.name: data}))

    def _check_range(self, data: Array) -> None:
        if dtype_name(self._dtype) == "float16" and isinstance(data, mx.nd.NDArray) \
                and dtype_name(data.dtype) == "float32":
            largest, = beyond_float16([data])
            if largest:
                raise ValueError(f"{self.name} is float16, which ends at 65504, and does not "
                                 "change. Parameters with larger values stay float32 if they are "
                                 "loaded before gluon_amp.convert. Received: up to "
                                 f"{largest:.6g}")


class RepeatableConstant(mx.init.Constant):
    """MXNet's initializer. MXNet's own writes an array into one symbol only, and fails at the next:
    a converted parameter has one for each of its types."""

    def dumps(self) -> str:
        value = self.value if np.isscalar(self.value) else np.asarray(
            getattr(self.value, "asnumpy", lambda: self.value)()).tolist()
        return json.dumps(["constant", {"value": value}])


def make_repeatable(parameter: Parameter) -> None:
    """Lets MXNet create several symbols of a parameter with an initializer."""
    if type(parameter.init) is mx.init.Constant:
        parameter.init = RepeatableConstant(parameter.init.value)


_seen: "weakref.WeakSet[Any]" = weakref.WeakSet()  # Trainers that have taken a step


def wrap_mxnet() -> None:
    """Wraps functions of MXNet that meet 16-bit parameters.

    `Trainer.step` and `update` warn, once, of a converted network without a loss scale or without
    master weights. `clip_global_norm`, which supports float32 only, names what clips 16-bit
    gradients. `ParameterDict.get` shares 16-bit parameters with new blocks, which expect float32.
    `SymbolBlock.cast` leaves the parameters of norms in float32, as for float16.
    """
    for name in ("step", "update"):
        @replace(mx.gluon.Trainer, name)
        def take_step(self: Any, *args: Any, original: Any, **kwargs: Any) -> Any:
            if self not in _seen:
                _seen.add(self)
                _warn_of_plain_trainer(self)
            return original(self, *args, **kwargs)

    @replace(mx.gluon.utils, "clip_global_norm")
    def clip_global_norm(arrays: Sequence[Array], *args: Any, original: Any, **kwargs: Any) -> Any:
        if any(is_16bit(array.dtype) for array in arrays):
            raise TypeError(
                "gluon.utils.clip_global_norm computes in the gradients' types, and some gradients "
                "of a converted network have 16 bits: call trainer.clip_norm(max_norm, batch_size) "
                "of a gluon_amp.Trainer, or set its clip_norm=, or clip the gradients that "
                "trainer.unscale() returns")
        return original(arrays, *args, **kwargs)

    @replace(mx.gluon.SymbolBlock, "cast")
    def cast_symbol(self: Any, dtype: Any, *, original: Any) -> None:
        if not is_bfloat16(dtype):
            return original(self, dtype)
        self._clear_cached_op()
        mx.gluon.HybridBlock.cast(self, dtype)
        for name in norm_variables(Graph.read(self._cached_graph[1])):
            self.params.get(name).cast("float32")

    @replace(mx.gluon.ParameterDict, "get")
    def get(self: Any, name: str, *, original: Any, **kwargs: Any) -> Any:
        if isinstance(self._get_impl(self.prefix + name), ConvertedParameter) \
                and dtype_name(kwargs.get("dtype")) == "float32":
            del kwargs["dtype"]
        return original(self, name, **kwargs)


def _warn_of_plain_trainer(trainer: Any) -> None:
    """Warns of 16-bit weights without master weights, which MXNet has for float16 only, and of
    float16 gradients without a loss scale."""
    marks: Dict[Any, Any] = {p: getattr(p, "converted_by_gluon_amp", None) for p in trainer._params
                             if p.grad_req != "null"}
    policies = [policy for policy in marks.values() if policy]
    if not policies or hasattr(trainer, "loss_scale"):  # gluon_amp.Trainer
        return
    low = {dtype_name(p.dtype) for p, mark in marks.items() if mark and is_16bit(p.dtype)}
    missing = []
    if low - {"float16"} or low and not trainer._optimizer.multi_precision:
        missing.append("no float32 master weights: updates below "
                       f"1/{2048 if 'float16' in low else 256} of a weight are lost")
    narrow = any(policy.compute == FLOAT16 for policy in policies)
    if narrow and trainer._scale == 1:  # else rescale_grad undoes a manual loss scale
        missing.append("no loss scale: gradients below 3e-8 are 0")
    if missing:
        log.warning("gluon.Trainer trains a converted network with %s. gluon_amp.Trainer has both",
                    ", and with ".join(missing))


def cast(parameter: Parameter, dtype: str) -> None:
    """Casts a parameter's values and gradients, as `Parameter.cast` does. On a CPU it uses our
    kernels, which take a tenth of the time. Its symbol declares the new type. Its class becomes
    that of 16-bit parameters, or MXNet's."""
    if type(parameter) in (mx.gluon.Parameter, ConvertedParameter):
        parameter.__class__ = ConvertedParameter if dtype in TYPES_16BIT else mx.gluon.Parameter
    if dtype_name(parameter.dtype) == dtype:
        return
    parameter._var = None  # created again on access
    parameter._dtype = dtype
    if parameter._data is None:
        return
    with mx.autograd.pause():
        parameter._data = [_in_type(array, dtype) for array in parameter._data]
        if parameter._grad is not None:
            parameter._grad = [_in_type(array, dtype) for array in parameter._grad]
            mx.autograd.mark_variables(parameter._data, parameter._grad, parameter.grad_req)


def constant_fits(constant: "mx.gluon.Constant", format_: Format) -> bool:
    """Whether a constant may be cast to the type of the activations it meets: only if the format
    holds its values and represents integers up to them exactly."""
    values = (constant._data or [constant.value])[0].asnumpy().astype("float64")
    whole = np.array_equal(values, np.rint(values))
    counts = not whole or np.abs(values).max(initial=0) <= format_.counts_to
    return bool(counts and format_.keeps(values))


def value_of(parameter: Parameter) -> Array:
    """Returns a parameter's value on a CPU, the mean over devices, in the parameter's type."""
    return parameter._reduce().astype(parameter.dtype, copy=False)


def _in_type(array: Array, dtype: str) -> Array:
    if isinstance(array, mx.np.ndarray):
        return array.astype(dtype)
    return to_16bit(array, dtype) if dtype in TYPES_16BIT else to_float32(array)


def complete_copy(parameter: Parameter) -> None:
    """Completes a copy of a parameter: MXNet copies arrays to the first device without gradients,
    and its copies of numpy symbols are plain symbols."""
    parameter._var = None  # created again on access
    if parameter._data is None:
        return
    parameter._data = [on_device(array, device)
                       for array, device in zip(parameter._data, parameter._ctx_list)]
    before = parameter._grad
    parameter._init_grad()
    for mine, theirs in zip(parameter._grad or (), before or ()):
        theirs.copyto(mine)
