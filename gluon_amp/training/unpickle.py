"""A reader of pickled optimizer states.

A pickle is a program that may call any function. This reader is Python's own, `pickle._Unpickler`,
with only the opcodes that Python 3 writes for optimizer states. The functions of this file build
MXNet's optimizers, schedulers and arrays, numpy's arrays and Python's values, and check their
arguments. Classes of the user are built as `pickle` builds them.
"""
import io
import math
import pickle
import re
import struct
import sys
from collections import OrderedDict, defaultdict
from typing import Any, Callable, Dict, Iterable, List, Mapping, Sequence, Tuple

from .._mxnet import mx, np
from .._numpy import CORE
from ..cpu.bfloat16 import BFLOAT16
from .optimizer import _Decimal, _revive

_MOVED = {"gluon_amp.optimizer": "gluon_amp.training.optimizer",  # in files of 0.1.0
          "gluon_amp.adamw": "gluon_amp.training.adamw"}
_OBJECTS = (mx.optimizer.Optimizer, mx.lr_scheduler.LRScheduler)
_DICTIONARIES = (dict, OrderedDict, defaultdict)
# Classes that `find` gives; numpy's only stay values.
_CLASSES = (*_OBJECTS, mx.nd.NDArray, np.generic, np.ndarray)
_KEYS = (str, int, float, bytes, np.generic, type(None))
_LARGEST_KEY = 1 << 60  # hashes of larger integers collide
_DEEPEST = 50  # containers within containers


def load(data: bytes, own: Mapping[Tuple[str, str], Any]) -> Any:
    """Returns the value of a pickle.

    Args:
        data: the pickle.
        own: the classes of the user that it may have, by module and name.

    Raises:
        Exception: it has other opcodes, classes or functions, or it is damaged.
    """
    stream = io.BytesIO(data)
    reader = _Reader(stream, own)
    value = reader.load()
    if reader.stack or reader.metastack or stream.read(1):
        raise ValueError("it has data after its end")
    if any(isinstance(one, mx.nd.NDArray) and one.handle is None for one in reader.made):
        raise ValueError("it has an array without values")
    _check_size([value, *(vars(one) for one in reader.made if isinstance(one, _OBJECTS))],
                10 * len(data) + 1000)
    return value


_PythonReader: Any = pickle._Unpickler


class _Reader(_PythonReader):
    """Python's unpickler with the opcodes of `_OPCODES` alone, some of which it checks."""

    def __init__(self, stream: io.BytesIO, own: Mapping[Tuple[str, str], Any]) -> None:
        super().__init__(stream)
        self.own = own
        self.made: List[Any] = []  # MXNet's arrays, optimizers and schedulers

    def take(self, count: int) -> List[Any]:
        """Removes and returns the last values."""
        if len(self.stack) < count:
            raise ValueError("it takes values that are not there")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def extend(self, values: List[Any]) -> None:
        _exactly(self.stack[-1], list).extend(values)

    def add(self, values: List[Any]) -> None:
        _exactly(self.stack[-1], set).update(map(_key, values))

    def set_items(self, items: List[Any]) -> None:
        if len(items) % 2:
            raise ValueError("it has a key without a value")
        into = _exactly(self.stack[-1], *_DICTIONARIES)
        into.update(zip(map(_key, items[::2]), items[1::2]))

    def read_bytearray(self) -> None:
        """Pushes a bytearray. Python's reader would allocate any length that the file states."""
        length, = struct.unpack("<Q", self.read(8))
        data = self.read(min(length, sys.maxsize))
        if len(data) < length:
            raise ValueError("it ends within an array")
        self.stack.append(bytearray(data))

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class of the user, a class that stays a value, or the function that builds the
        objects of a class. Imports nothing."""
        # Files of numpy 1 have numpy.core and those of numpy 2 numpy._core; each reads both.
        module = re.sub(r"^numpy\._?core\b", CORE, _MOVED.get(module, module))
        found = self.own.get((module, name)) or _BUILDERS.get(f"{module}.{name}")
        if found is None and module.partition(".")[0] in ("mxnet", "numpy", "gluon_amp"):
            found = vars(sys.modules.get(module, object)).get(name)
            if not (isinstance(found, type) and issubclass(found, _CLASSES)):
                found = None
        if found is None:
            raise ValueError(
                f"it names {module}.{name}, which was not called. Valid: optimizers, schedulers "
                "and arrays of MXNet's, and the classes of the optimizer and scheduler in use")
        return found

    def call(self, function: Any, arguments: Any) -> None:
        """Calls a function of this file, or a class of the user."""
        if _is_in(function, _BUILDERS.values()) or _is_in(function, self.own.values()) \
                or _is_in(function, _ARRAYS) and arguments == (None,):
            self.push_object(function(*_exactly(arguments, tuple)))
        else:
            raise ValueError(f"it calls a {type(function).__name__}")

    def create(self, cls: Any, arguments: Any, keywords: Any = None) -> None:
        """Creates an object without a call of its `__init__`."""
        if cls is _decimal:
            self.stack.append(_decimal(*arguments))
        elif _is_in(cls, self.own.values()):
            self.push_object(cls.__new__(cls, *arguments, **(keywords or {})))
        elif isinstance(cls, type) and issubclass(cls, _OBJECTS) and arguments == ():
            create: Any = cls.__new__
            self.push_object(create(cls))
        else:
            raise ValueError(f"it creates a {_name_of(cls)}")

    def push_object(self, made: Any) -> None:
        if isinstance(made, (*_OBJECTS, mx.nd.NDArray)):
            self.made.append(made)
        self.stack.append(made)

    def build(self, state: Any) -> None:
        """Sets the state of the last object."""
        made: Any = self.stack[-1]
        if type(made) in _ARRAYS and made.handle is None:
            made.__setstate__({"handle": _checked(state["handle"], type(made))})
        elif type(made) is np.ndarray:
            _fill(made, *state)
        elif isinstance(made, np.dtype) and state in _states_of(made):
            made.__setstate__(state)  # type: ignore[attr-defined]
        elif isinstance(made, _OBJECTS):
            if isinstance(state, dict):
                _check_names(type(made), state)
            elif not _is_in(type(made), self.own.values()):
                raise ValueError(f"it has no attributes of {type(made).__name__}")
            getattr(made, "__setstate__", made.__dict__.update)(state)
        else:
            raise ValueError(f"it sets the state of a {type(made).__name__}")


def _refuse(reader: _Reader) -> None:
    raise ValueError("it has an opcode that no optimizer state has")


def _is_in(value: Any, values: Iterable[Any]) -> bool:
    return any(value is each for each in values)


def _name_of(value: Any) -> str:
    """Returns the name of a class, or of a value's class. Unfinished arrays have no `repr`."""
    return value.__name__ if isinstance(value, type) else f"{type(value).__name__} object"


def _exactly(value: Any, *types: type) -> Any:
    """Returns a value of exactly one of these types."""
    if type(value) not in types:
        raise ValueError(f"it has a {type(value).__name__} instead of a {types[0].__name__}")
    return value


def _key(value: Any) -> Any:
    """Returns a value that a dictionary or a set finds quickly."""
    for one in value if type(value) is tuple else (value,):
        if not isinstance(one, _KEYS) or isinstance(one, int) and abs(one) >= _LARGEST_KEY:
            raise ValueError(f"it has a {type(value).__name__} as a key")
    return value


def _check_names(cls: type, attributes: Mapping[Any, Any]) -> None:
    """Refuses attributes that hide methods of MXNet's classes and of this package."""
    ours = [vars(base) for base in cls.__mro__
            if base.__module__.partition(".")[0] in ("mxnet", "gluon_amp")]
    for name in attributes:
        if not isinstance(name, str) or any(callable(members.get(name)) for members in ours):
            raise ValueError(f"it replaces {cls.__name__}.{name}")


def _check_size(values: Sequence[Any], most: int) -> None:
    """Refuses containers that contain themselves, or each other so often that a walk through all
    of them has more than `most` steps."""
    waiting = [(value, 0) for value in values]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, _DICTIONARIES):
            inside = [*value, *value.values()]
        else:
            inside = list(value) if isinstance(value, (list, tuple, set, frozenset)) else []
        most -= len(inside)
        if most < 0 or depth > _DEEPEST:
            raise ValueError("its values contain each other too often")
        waiting += [(one, depth + 1) for one in inside]


# ---- arrays


def _shape(shape: Any) -> Tuple[int, ...]:
    if len(_exactly(shape, tuple)) > 32 or not all(_exactly(n, int) >= 0 for n in shape):
        raise ValueError("it has an array with an invalid shape")
    return shape


def _checked(raw: Any, cls: type) -> bytearray:
    """Checks the bytes of one of MXNet's arrays, which MXNet would read without checks. The context
    becomes the CPU if the array's GPU is not there.

    magic, storage type; of a sparse array the shape of its values; shape; device type and number;
    type; of a sparse array the type and the shape of its indices; values; indices
    """
    at = 0

    def read(form: str) -> Tuple[int, ...]:
        nonlocal at
        at += struct.calcsize(f"<{form}")
        return struct.unpack_from(f"<{form}", raw, at - struct.calcsize(f"<{form}"))

    def read_shape() -> Tuple[int, ...]:
        dimensions, = read("i")
        if not 0 <= dimensions <= 32:
            raise ValueError(f"it has an array with {dimensions} dimensions")
        return _shape(read(f"{dimensions}q"))

    _exactly(raw, bytearray)
    is_sparse = cls is mx.nd.sparse.RowSparseNDArray
    magic, storage = read("Ii")
    values = read_shape() if is_sparse else ()
    shape = read_shape()
    device_at = at
    device, number, type_flag = read("3i")
    known = (magic == _NUMPY_MAGIC and not is_sparse) or (magic == _MAGIC and 0 not in shape
                                                          and shape != ())
    if not known or storage != int(is_sparse) or type_flag not in _TYPES:
        raise ValueError("it has an array of an unknown kind")
    rows = 0
    if is_sparse:
        index_type, one, rows = read("2iq")
        if (index_type, one) != (_INT64, 1) or not 0 <= rows <= shape[0] \
                or values != (rows, *shape[1:]):
            raise ValueError("it has a sparse array with other indices")
    else:
        values = shape
    at += math.prod(values) * np.dtype(_TYPES[type_flag]).itemsize
    if len(raw) != at + 8 * rows:
        raise ValueError(f"it has an array of {len(raw)} bytes instead of {at + 8 * rows}")
    indices = np.frombuffer(raw, "<i8", rows, at)
    if rows and (indices[0] < 0 or indices[-1] >= shape[0] or not (np.diff(indices) > 0).all()):
        raise ValueError("it has a sparse array with other indices")
    if device != _CPU and not (device == _GPU and 0 <= number < mx.context.num_gpus()):
        struct.pack_into("<2i", raw, device_at, _CPU, 0)
    return raw


_MAGIC, _NUMPY_MAGIC = 0xF993FAC9, 0xF993FACA
_CPU, _GPU = 1, 2
_TYPES = {flag: dtype for flag, dtype in mx.nd.ndarray._DTYPE_MX_TO_NP.items() if flag >= 0}
_INT64 = 6
_ARRAYS = (mx.nd.NDArray, mx.nd.sparse.RowSparseNDArray, mx.np.ndarray)


def _dtype(code: Any, align: bool, copy: bool) -> Any:
    if not re.fullmatch("[biufc](1|2|4|8|16|32)|V2", _exactly(code, str)):
        raise ValueError(f"it has the numpy type {code!r:.200}")
    return np.dtype(code, False, True)


def _states_of(dtype: Any) -> List[Any]:
    """Returns the states that numpy writes for a type."""
    return [BFLOAT16.__reduce__()[2]] if dtype.kind == "V" else \
        [(3, order, None, None, None, -1, -1, 0) for order in "<>|"]


def _check_array(dtype: Any, shape: Any, data: Any) -> None:
    """Refuses values of numpy that do not fill an array of numbers."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufc":
        raise ValueError(f"it has a numpy array of {_name_of(dtype)}")
    if len(_exactly(data, bytes, bytearray)) != math.prod(_shape(shape)) * dtype.itemsize:
        raise ValueError(f"it has a numpy array of {len(data)} bytes for {shape}")


def _empty(cls: Any, shape: Any, code: Any) -> Any:
    if cls is not np.ndarray:
        raise ValueError(f"it has an array of {_name_of(cls)}")
    return np.empty(0)


def _fill(array: Any, version: Any, shape: Any, dtype: Any, fortran: Any, data: Any) -> None:
    _check_array(dtype, shape, data)
    array.__setstate__((1, shape, dtype, bool(fortran), bytes(data)))


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    _check_array(dtype, shape, data)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C").copy("K")


def _scalar(dtype: Any, data: Any) -> Any:
    _check_array(dtype, (), data)
    return np.frombuffer(data, dtype)[0]


# ---- other objects


def _revived(cls: Any) -> Any:
    if not (isinstance(cls, type) and issubclass(cls, mx.optimizer.Optimizer)):
        raise ValueError(f"it has an optimizer of {_name_of(cls)}")
    return _revive(cls)


def _decimal(number: Any) -> Any:
    return _Decimal(_exactly(number, float))


def _set(items: Any = ()) -> Any:
    return set(map(_key, _exactly(items, list, tuple)))


def _whole(values: Sequence[Any]) -> Sequence[Any]:
    return [None if value is None else _exactly(value, int) for value in values]


_BUILDERS: Dict[str, Callable[..., Any]] = {
    "gluon_amp.training.optimizer._revive": _revived,
    "gluon_amp.training.optimizer._Decimal": _decimal,
    "builtins.set": _set,
    "builtins.frozenset": lambda items=(): frozenset(_set(items)),
    "builtins.bytearray": lambda data=b"": bytearray(_exactly(data, bytes)),
    "builtins.complex": lambda *parts: complex(*(_exactly(part, float) for part in parts)),
    "builtins.range": lambda *ends: range(*_whole(ends)),
    "builtins.slice": lambda *ends: slice(*_whole(ends)),
    "collections.OrderedDict": lambda: OrderedDict(),
    "collections.defaultdict": lambda factory=None: defaultdict(set if factory is _set else None),
    "numpy.dtype": _dtype,
    f"{CORE}.multiarray._reconstruct": _empty,
    f"{CORE}.multiarray.scalar": _scalar,
    f"{CORE}.numeric._frombuffer": _from_buffer,
}
# What Python 3 writes for optimizer states, and how they are read; by default as Python does.
_OPCODES: Dict[str, Callable[[_Reader], None]] = {
    **{name: _PythonReader.dispatch[getattr(pickle, name)[0]]
       for name in """
        PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL
        NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
        SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
        EMPTY_LIST EMPTY_DICT EMPTY_SET EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE
    """.split()},
    "BYTEARRAY8": _Reader.read_bytearray,
    "FROZENSET": lambda reader: reader.append(frozenset(map(_key, reader.pop_mark()))),
    "APPEND": lambda reader: reader.extend(reader.take(1)),
    "APPENDS": lambda reader: reader.extend(reader.pop_mark()),
    "ADDITEMS": lambda reader: reader.add(reader.pop_mark()),
    "SETITEM": lambda reader: reader.set_items(reader.take(2)),
    "SETITEMS": lambda reader: reader.set_items(reader.pop_mark()),
    "REDUCE": lambda reader: reader.call(*reader.take(2)),
    "NEWOBJ": lambda reader: reader.create(*reader.take(2)),
    "NEWOBJ_EX": lambda reader: reader.create(*reader.take(3)),
    "BUILD": lambda reader: reader.build(*reader.take(1)),
}
_Reader.dispatch = defaultdict(
    lambda: _refuse, {getattr(pickle, name)[0]: read for name, read in _OPCODES.items()})
