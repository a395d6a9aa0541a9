"""Float16 parameters of converted blocks: how they are initialized, saved, loaded and copied."""
from contextlib import contextmanager
from typing import Any, Iterable, Iterator

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
    files of either type."""

    def _reduce(self) -> Any:
        copies = [to_float32(w.copyto(mx.cpu())) for w in self.list_data()]
        return copies[0] if len(copies) == 1 else sum(copies) / len(copies)

    def _init_impl(self, data: Any, ctx_list: Any) -> None:
        super()._init_impl(data.astype(self.dtype, copy=False), ctx_list)

    def _load_init(self, data: Any, ctx: Any, cast_dtype: bool = True,
                   dtype_source: str = "current") -> None:
        super()._load_init(data, ctx, True, dtype_source)


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
