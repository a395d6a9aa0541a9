"""Casts data to 16 bits before it is copied to a device, but never labels.

Float16 represents integers exactly up to 2048: a label of 2049 becomes 2048.
"""
from __future__ import annotations

from typing import Any, Hashable, Iterable, List

from ._mxnet import mx, np
from .annotations import Array, DataBatch, DataDesc, DataIter
from .cpu.arrays import TYPES_16BIT, dtype_name, to_16bit
from .cpu.bfloat16 import BFLOAT16
from .cpu.library import load
from .formats import FORMATS


class Cast:
    """A transform for Gluon's datasets and DataLoader that casts data and keeps labels.

        dataset.transform(gluon_amp.data.Cast())         # of (data, label)
        dataset.transform_first(gluon_amp.data.Cast())   # of data alone

    Args:
        dtype: "float16", "bfloat16" or "float32". Integers do not change. Arrays of numpy, which
            has no bfloat16, become arrays of MXNet.

    Raises:
        ValueError: a 16-bit label is above 2048 (bfloat16: 256), so that it may already be wrong.
    """

    def __init__(self, dtype: str = "float16") -> None:
        """See the class for the arguments."""
        self.dtype = _floating(dtype)

    def __call__(self, data: Array, *labels: Any) -> Any:
        for label in labels:
            check_label(label)
        cast = _cast(data, self.dtype)
        return (cast, *labels) if labels else cast


class CastIter(DataIter):
    """A DataIter that casts data and keeps labels.

    Args:
        data_iter: any DataIter.
        dtype: "float16", "bfloat16" or "float32".

    Raises:
        TypeError: `data_iter` is no DataIter, such as a DataLoader, which takes `Cast`.
    """

    def __init__(self, data_iter: DataIter, dtype: str = "float16") -> None:
        """See the class for the arguments."""
        lacking = [name for name in ("batch_size", "provide_data", "provide_label", "next", "reset")
                   if not hasattr(data_iter, name)]
        if lacking:
            raise TypeError("CastIter takes a DataIter of mx.io or mx.image; a dataset of Gluon "
                            "takes data.Cast. Received: "
                            f"{type(data_iter).__name__}, without {', '.join(lacking)}")
        super().__init__(data_iter.batch_size)
        self.data_iter, self.dtype = data_iter, _floating(dtype)

    @property
    def provide_data(self) -> List[Any]:
        """Names, shapes and types of a batch's data after the cast."""
        return _cast_descriptions(self.data_iter.provide_data, self.dtype)

    @property
    def provide_label(self) -> List[DataDesc]:
        """Names, shapes and types of a batch's labels."""
        return self.data_iter.provide_label

    def reset(self) -> None:
        """Starts the data from the beginning."""
        self.data_iter.reset()

    def next(self) -> DataBatch:
        """Returns the next batch, its data cast."""
        batch = self.data_iter.next()
        for label in batch.label or []:
            check_label(label)
        data, label = self.provide_data, batch.provide_label
        if batch.provide_data is not None:  # of its bucket
            data = _cast_descriptions(batch.provide_data, self.dtype)
        return DataBatch([_cast(d, self.dtype) for d in batch.data], batch.label, batch.pad,
                         batch.index, batch.bucket_key, data,
                         self.provide_label if label is None else label)


def check_label(label: Array) -> None:
    """Refuses 16-bit labels beyond the integers that their type represents exactly, which may be
    rounded class indices."""
    name = dtype_name(getattr(label, "dtype", None))
    if name not in TYPES_16BIT or not getattr(label, "size", 1):
        return
    format_ = FORMATS[name]
    largest = float(np.max(label.asnumpy() if isinstance(label, mx.nd.NDArray) else label))
    if largest > format_.counts_to:
        raise ValueError(f"labels are {name}, which counts to {format_.counts_to} only: keep them "
                         f"as they were, float32 or int32. Received: a label of {largest:g}")


def _floating(dtype: str) -> str:
    if dtype not in FORMATS:
        raise ValueError(f"dtype must be float16, bfloat16 or float32. Received: {dtype!r}")
    if dtype == "bfloat16":
        load()
    return dtype


def _is_float(dtype: Hashable) -> bool:
    return dtype_name(dtype) in ("float16", "bfloat16", "float32", "float64")


def _cast_descriptions(given: Iterable[Any], dtype: str) -> List[DataDesc]:
    """Returns descriptions of data after the cast. MXNet accepts pairs of name and shape, too."""
    descriptions = [d if isinstance(d, DataDesc) else DataDesc(*d) for d in given]
    type_of_arrays = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype).type
    return [DataDesc(d.name, d.shape, type_of_arrays if _is_float(d.dtype) else d.dtype, d.layout)
            for d in descriptions]


def _cast(data: Array, dtype: str) -> Any:
    if not hasattr(data, "dtype"):
        raise TypeError("data is cast in arrays of MXNet or numpy. Received: "
                        f"{type(data).__name__}")
    if not _is_float(data.dtype) or dtype_name(data.dtype) == dtype:
        return data
    if dtype == "bfloat16" and not isinstance(data, mx.nd.NDArray):
        data = (mx.np if mx.util.is_np_array() else mx.nd).array(data, dtype="float32")
    if isinstance(data, mx.nd.NDArray) and dtype in TYPES_16BIT:
        return to_16bit(data, dtype)
    return data.astype(dtype)
