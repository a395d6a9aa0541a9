"""The format of files of optimizer states: JSON and arrays.

    gluon_amp states 1 SHA-256 of what follows
    JSON: optimizer, scheduler, states, loss scale and counters
    the arrays in the order of the JSON, in MXNet's binary format, each of which states its shape

JSON has no tuples, no keys other than texts, and no arrays: they are {"$tuple": [...]},
{"$dict": [[key, value], ...]} and {"$array": [kind, number of bytes]}.
"""
import hashlib
import json
import math
import struct
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .._mxnet import mx, np
from ..files import replace_file

MAGIC = b"gluon_amp states 1 "
_LARGEST = 1 << 60  # hashes of larger integers collide
KINDS = {"nd": mx.nd.NDArray, "row_sparse": mx.nd.sparse.RowSparseNDArray, "np": mx.np.ndarray}
_DIGEST = 64  # characters


class Settings(NamedTuple):
    """The name of the class of an optimizer or a scheduler, and its attributes."""
    name: str
    values: Dict[str, Any]


class Saved(NamedTuple):
    """The contents of a file of optimizer states.

    Attributes:
        states: the state of each parameter.
        optimizer: None in some files of MXNet.
        scheduler: the optimizer's scheduler.
        training: the names of parameters, the state of the steps, and averages of weights.
    """
    states: Dict[Any, Any]
    optimizer: Optional[Settings]
    scheduler: Optional[Settings]
    training: Dict[str, Any]


def write(fname: str, saved: Saved) -> None:
    """Writes a file, atomically.

    Raises:
        TypeError: a value is no number, text, list, dictionary or array.
    """
    arrays: List[bytes] = []
    parts = {part: value and [value.name, _encoded(value.values, value.name, arrays)]
             if isinstance(value, Settings) else _encoded(value, part, arrays)
             for part, value in saved._asdict().items()}
    body = [json.dumps(parts).encode(), b"\n", *arrays]
    digest = hashlib.sha256()
    for piece in body:
        digest.update(piece)

    def write_to(path: str) -> None:
        with open(path, "wb") as file:
            file.writelines([MAGIC, digest.hexdigest().encode(), b"\n", *body])
    replace_file(fname, write_to)


def parse(data: bytes) -> Saved:
    """Returns the contents of a file.

    Raises:
        Exception: it is damaged.
    """
    start = len(MAGIC) + _DIGEST + 1
    digest = hashlib.sha256(memoryview(data)[start:]).hexdigest()
    if data[len(MAGIC):start] != digest.encode() + b"\n":
        raise ValueError("its checksum does not fit")
    at = data.index(b"\n", start) + 1

    def decoded(value: Dict[str, Any]) -> Any:
        nonlocal at
        tag: str = next(iter(value), "")
        content: Any = value.get(tag)
        if tag == "$tuple":
            return tuple(content)
        if tag == "$dict":
            return {check_key(key): item for key, item in content}
        if tag == "$array":
            kind, length = content
            raw = bytearray(memoryview(data)[at:at + max(exactly(length, int), 0)])
            at += len(raw)
            return array(kind, raw)
        return value

    parts: Dict[str, Any] = json.loads(data[start:at].decode(), object_hook=decoded,
                                       parse_int=_whole)
    if at != len(data):
        raise ValueError("it has data after its end")
    optimizer, scheduler = (settings and Settings(exactly(settings[0], str),
                                                  exactly(settings[1], dict))
                            for settings in (parts["optimizer"], parts["scheduler"]))
    return Saved(exactly(parts["states"], dict), optimizer, scheduler,
                 exactly(parts["training"], dict))


def _encoded(value: Any, what: str, arrays: List[bytes]) -> Any:
    """Returns a value for JSON, and appends the bytes of its arrays to a list."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, float, str)) \
            or isinstance(value, int) and abs(value) < _LARGEST:
        return value
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, f"{what}[{i}]", arrays) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        pairs = [(key, _encoded(item, f"{what}.{key}", arrays)) for key, item in value.items()]
        is_plain = all(type(key) is str and not key.startswith("$") for key in value)
        return dict(pairs) if is_plain else {"$dict": pairs}
    for kind, cls in KINDS.items():
        if type(value) is cls:
            arrays.append(value.__getstate__()["handle"])
            return {"$array": [kind, len(arrays[-1])]}
    raise TypeError("a file of states holds numbers, texts, lists, dictionaries with texts or "
                    f"integers as keys, and arrays. Received: {what}, a {type(value).__name__}. "
                    "Valid: a class with state_dict(), which returns such values, and "
                    "load_state_dict(state)")


def _whole(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"it has an integer of {len(text)} digits")
    return int(text)


def check_key(key: Any) -> Any:
    """Returns a key that a dictionary finds quickly."""
    if type(key) is not str and abs(exactly(key, int)) >= _LARGEST:
        raise ValueError("it has a large integer as a key")
    return key


def exactly(value: Any, cls: type) -> Any:
    """Returns a value of exactly this type."""
    if type(value) is not cls:
        raise ValueError(f"it has a {type(value).__name__} instead of a {cls.__name__}")
    return value


# ---- arrays


def array(kind: str, raw: bytearray) -> Any:
    """Returns an array of MXNet from its binary format, which MXNet would read without checks.

    A device that is not there becomes the CPU.

    Raises:
        Exception: the bytes are not one array of this kind.
    """
    _check_array(kind, raw)
    empty: Any = KINDS[kind](None)
    empty.__setstate__({"handle": raw})
    return empty


def _check_array(kind: str, raw: bytearray) -> None:
    """Checks the bytes of an array.

    magic, storage type; of a sparse array the shape of its values; shape; device type and number;
    type; of a sparse array the type and the shape of its indices; values; indices
    """
    at = 0

    def read(form: str) -> Tuple[int, ...]:
        nonlocal at
        start, at = at, at + struct.calcsize(f"<{form}")
        return struct.unpack_from(f"<{form}", raw, start)

    def read_shape() -> Tuple[int, ...]:
        return read(f"{min(*read('I'), 33)}q")

    is_sparse = kind == "row_sparse"
    magic, storage = read("Ii")
    values = read_shape() if is_sparse else ()
    shape = read_shape()
    device_at = at
    device, number, type_flag = read("3i")
    classic = magic == _MAGIC and 0 not in shape and shape != ()
    if not (classic or magic == _NUMPY_MAGIC and not is_sparse) or storage != int(is_sparse) \
            or len(shape) > 32 or min((0, *shape)) < 0 or type_flag not in _TYPES:
        raise ValueError("it has an array of an unknown kind")
    rows = 0
    if is_sparse:
        index_type, dimensions, rows = read("2iq")
        if (index_type, dimensions) != (_INT64, 1) or not 0 <= rows <= shape[0] \
                or values != (rows, *shape[1:]):
            raise ValueError("it has a sparse array with other indices")
    size = math.prod(values if is_sparse else shape) * np.dtype(_TYPES[type_flag]).itemsize
    if len(raw) != at + size + 8 * rows:
        raise ValueError(f"it has an array of {len(raw)} bytes instead of {at + size + 8 * rows}")
    indices = np.frombuffer(raw, "<i8", rows, at + size)
    if rows and (indices[0] < 0 or indices[-1] >= shape[0] or not (np.diff(indices) > 0).all()):
        raise ValueError("it has a sparse array with other indices")
    if device != _CPU and not (device == _GPU and 0 <= number < mx.context.num_gpus()):
        struct.pack_into("<2i", raw, device_at, _CPU, 0)


_MAGIC, _NUMPY_MAGIC = 0xF993FAC9, 0xF993FACA
_CPU, _GPU = 1, 2
_TYPES = {flag: dtype for flag, dtype in mx.nd.ndarray._DTYPE_MX_TO_NP.items() if flag >= 0}
_INT64 = 6
