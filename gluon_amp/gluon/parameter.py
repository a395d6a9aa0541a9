"""Float16 parameters of converted blocks: initialized, saved, loaded, shared and copied."""
import sys
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, List

from .._mxnet import mx
from ..cpu.arrays import dtype_name, to_float32


@contextmanager
def initialized_in_float32(parameters: Iterable["mx.gluon.Parameter"],
                           again: bool = False) -> Iterator[None]:
    """Makes float16 parameters float32 for a while in which they are initialized, so that they
    draw the same random values as a float32 network's.

    Args:
        again: also those that have values already.
    """
    half = [p for p in parameters
            if dtype_name(p.dtype) == "float16" and (again or p._data is None)]
    for parameter in half:
        parameter.cast("float32")
    try:
        yield
    finally:
        for parameter in half:
            parameter.cast("float16")


class ConvertedParameter(mx.gluon.Parameter):
    """A float16 parameter: whichever block it is in, it goes into files as float32, and comes from
    files of either type. A new block may share it."""

    @property
    def dtype(self) -> Any:
        """The parameter's type. A block that is made with `params=` of a converted one expects
        float32, and MXNet asks here whether that is so: the block then gets it as it is."""
        asking = sys._getframe(1)
        if asking.f_code is mx.gluon.ParameterDict.get.__code__:
            expected = asking.f_locals["v"]
            if dtype_name(expected) == "float32":
                return expected
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: Any) -> None:
        self.cast(dtype)

    def grad(self, ctx: Any = None) -> Any:
        return _as_converted(super().grad(ctx))

    def list_grad(self) -> List[Any]:
        return [_as_converted(gradient) for gradient in super().list_grad()]

    def _reduce(self) -> Any:
        copies = [to_float32(w.copyto(mx.cpu())) for w in self.list_data()]
        return copies[0] if len(copies) == 1 else sum(copies) / len(copies)

    def _init_impl(self, data: Any, ctx_list: Any) -> None:
        super()._init_impl(data.astype(self.dtype, copy=False), ctx_list)

    def _load_init(self, data: Any, ctx: Any, cast_dtype: bool = True,
                   dtype_source: str = "current") -> None:
        super()._load_init(data, ctx, True, dtype_source)


class _ConvertedGradient:
    """A float16 gradient, which `gluon.utils.clip_global_norm` cannot take."""
    __slots__ = ()

    @property
    def stype(self) -> str:
        """How it is stored: what `clip_global_norm` asks first of all."""
        if sys._getframe(1).f_globals.get("__name__") == "mxnet.gluon.utils":
            raise TypeError(
                "gluon.utils.clip_global_norm computes in the gradients' own types, and those of a "
                "converted network are float16, some of them: call trainer.clip_norm(max_norm, "
                "batch_size) of a gluon_amp.Trainer, or give it clip_norm=, or clip what "
                "trainer.unscale() returns")
        return super().stype  # type: ignore[misc]


class _Classic(_ConvertedGradient, mx.nd.NDArray):
    __slots__ = ()


class _Numpy(_ConvertedGradient, mx.np.ndarray):
    __slots__ = ()


def _as_converted(gradient: Any) -> Any:
    if not isinstance(gradient, _ConvertedGradient) and gradient.stype == "default":
        gradient.__class__ = _Numpy if isinstance(gradient, mx.np.ndarray) else _Classic
    return gradient


def complete_copy(parameter: Any) -> None:
    """MXNet's copies of arrays lie on the first device, and have no gradients."""
    if parameter._data is None:
        return
    parameter._data = [array.as_in_context(device)
                       for array, device in zip(parameter._data, parameter._ctx_list)]
    before = parameter._grad
    parameter._init_grad()
    for mine, theirs in zip(parameter._grad or (), before or ()):
        theirs.copyto(mine)
