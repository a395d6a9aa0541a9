"""A reader of the files of optimizer states of MXNet and of gluon_amp 0.2.0 and earlier: pickles.

A pickle is a program that may call any function. This reader is Python's own, `pickle._Unpickler`,
with only the opcodes that Python 3 writes for optimizer states. It imports nothing: a class stays a
name, and an object is a name with attributes.
"""
import hashlib
import io
import pickle
import re
import struct
import sys
from collections import defaultdict
from typing import Any, Callable, Dict, List

from .._mxnet import np
from .state_file import KINDS, Saved, Settings, array, check_key, exactly

_SEAL = b"\ngluon_amp sha256 "  # followed by 64 digits
_KINDS = {f"{cls.__module__}.{cls.__qualname__}": kind for kind, cls in KINDS.items()}
_DEEPEST = 50  # containers within containers

_PythonReader: Any = pickle._Unpickler


def parse(data: bytes) -> Saved:
    """Returns the contents of a file.

    Raises:
        Exception: it has other opcodes, classes or functions, or it is damaged.
    """
    end = len(data) - len(_SEAL) - 64
    if data[max(end, 0):].startswith(_SEAL):
        if hashlib.sha256(data[:end]).hexdigest().encode() != data[-64:]:
            raise ValueError("its checksum does not fit")
        data = data[:end]
    stream = io.BytesIO(data)
    reader = _Reader(stream)
    value = reader.load()
    if reader.stack or reader.metastack or stream.read(1):
        raise ValueError("it has data after its end")
    states, optimizer = value if type(value) is tuple and len(value) == 2 else (value, None)
    copied = _copier(10 * len(data) + 1000)
    if optimizer is None:
        return Saved(copied(exactly(states, dict)), None, None, {})
    attributes = dict(exactly(optimizer, _Object).attributes)
    attributes.pop("weight_types", None)  # classes of numpy in older files
    scheduler = attributes.pop("lr_scheduler", None)
    training = copied(exactly(attributes.pop("trainer_state", {}), dict))
    return Saved(copied(exactly(states, dict)), Settings(optimizer.name, copied(attributes)),
                 scheduler and Settings(exactly(scheduler, _Object).name,
                                        copied(scheduler.attributes)), training)


def _copier(most: int) -> Callable[[Any], Any]:
    """Returns a function that copies values, with arrays of MXNet. It refuses other objects, and
    containers that contain themselves, or each other so often that walks through all of them have
    more than `most` steps."""
    def copied(value: Any, depth: int = 0) -> Any:
        nonlocal most
        cls = type(value)
        if cls in (list, tuple, dict):
            most -= len(value)
            if most < 0 or depth > _DEEPEST:
                raise ValueError("its values contain each other too often")
            if cls is dict:
                return {key: copied(item, depth + 1) for key, item in value.items()}
            return cls(copied(item, depth + 1) for item in value)
        if cls is _Object and value.name in _KINDS:
            return array(_KINDS[value.name], exactly(value.attributes["handle"], bytearray))
        if value is None or cls in (bool, int, float, str) or isinstance(value, np.generic):
            return value
        raise ValueError(f"it holds a {getattr(value, 'name', value if cls is _Name else cls)}")
    return copied


class _Name(str):
    """The name of a class or a function. Calls return values of this file and of Python."""

    def __call__(self, *arguments: Any) -> Any:
        if arguments == () or self in _KINDS and arguments == (None,):
            return _Object(self)
        first = arguments[0]
        if self == "builtins.bytearray":
            return bytearray(exactly(first, bytes))
        if re.fullmatch(r"gluon_amp\.(training\.)?optimizer\._revive", self):
            return _Object(exactly(first, _Name))
        if re.fullmatch(r"gluon_amp\.(training\.)?optimizer\._Decimal", self):
            return exactly(first, float)
        if self == "numpy.dtype":
            return _Object(self, code=first, order=None)
        if re.fullmatch(r"numpy\._?core\.multiarray\.scalar", self):  # of numpy 1 and 2
            return _number(*arguments)
        raise ValueError(f"it names {self:.200}, which was not called. Valid: optimizers, "
                         "schedulers and arrays of MXNet's, and numbers of numpy's")


class _Object:
    """An object: the name of its class, and its attributes."""

    def __init__(self, name: str, **attributes: Any) -> None:
        self.name, self.attributes = name, attributes

    def build(self, state: Any) -> None:
        if self.name == "numpy.dtype":
            self.attributes["order"] = exactly(state, tuple)[1]
        else:
            self.attributes.update({exactly(name, str): value
                                    for name, value in exactly(state, dict).items()})


def _number(dtype: Any, data: Any) -> Any:
    """Returns a number of numpy's."""
    code, order = map(exactly(dtype, _Object).attributes.get, ("code", "order"))
    if not re.fullmatch("[iuf][1248]|b1", exactly(code, str)) or order not in ("<", "|") \
            or len(exactly(data, bytes)) != int(code[1]):
        raise ValueError("it has a number of an unknown type")
    return np.frombuffer(data, code)[0]


class _Reader(_PythonReader):
    """Python's unpickler with the opcodes of `_OPCODES` alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the name of a class or a function."""
        return _Name(f"{module}.{name}")

    def set_items(self, items: List[Any]) -> None:
        """Adds keys and values to the last dictionary."""
        exactly(self.stack[-1], dict).update(zip(map(check_key, items[::2]), items[1::2]))

    def read_bytearray(self) -> None:
        """Pushes a bytearray. Python's reader would allocate any length that the file states."""
        length, = struct.unpack("<Q", self.read(8))
        data = self.read(min(length, sys.maxsize))
        if len(data) < length:
            raise ValueError("it ends within an array")
        self.append(bytearray(data))

    def build(self) -> None:
        """Sets the attributes of the last object."""
        state = self.stack.pop()
        exactly(self.stack[-1], _Object).build(state)


def _refuse(reader: _Reader) -> None:
    raise ValueError("it has an opcode that no optimizer state has")


# What Python 3 writes for optimizer states, and how they are read; by default as Python does.
# Only a `_Name` can be called.
_OPCODES: Dict[str, Callable[[_Reader], None]] = {
    **{name: _PythonReader.dispatch[getattr(pickle, name)[0]]
       for name in """
        PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL
        NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
        SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
        EMPTY_LIST EMPTY_DICT EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE APPEND APPENDS REDUCE
    """.split()},
    "NEWOBJ": _PythonReader.dispatch[pickle.REDUCE[0]],
    "BYTEARRAY8": _Reader.read_bytearray,
    "SETITEM": lambda reader: reader.set_items([reader.stack.pop(), reader.stack.pop()][::-1]),
    "SETITEMS": lambda reader: reader.set_items(reader.pop_mark()),
    "BUILD": _Reader.build,
}
_Reader.dispatch = defaultdict(
    lambda: _refuse, {getattr(pickle, name)[0]: read for name, read in _OPCODES.items()})
