"""Writes the nodes of an ONNX graph, one operator of MXNet after the other.

A row of `operators.py` gets an `Operator`: the node, its inputs, and functions that add ONNX nodes.
An attribute that the row does not read is refused, so that none is silently ignored.
"""
import ast
from itertools import count, takewhile
from types import ModuleType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Set, Tuple

import numpy as np

from ..annotations import DType
from ..cpu.arrays import TYPES_16BIT
from ..formats import FORMATS
from ..graph.graph import Entry, Node
from ..graph.operators import CASTS

OPSET = 13  # the version of ONNX's operators
BFLOAT16 = "bfloat16"  # numpy has no such type: its values are in float32 arrays

# Attributes that select MXNet's algorithm, or that other attributes and shapes determine.
_IGNORED = frozenset("workspace cudnn_off cudnn_tune num_args num_filter num_hidden".split())


def as_type(numbers: Any, dtype: Optional[str]) -> Any:
    """Returns an array rounded to a type."""
    if dtype == BFLOAT16:
        return FORMATS[BFLOAT16].round(np.asarray(numbers, np.float32))
    return np.asarray(numbers).astype(dtype)


def element_type(onnx: ModuleType, dtype: Optional[str]) -> int:
    """Returns ONNX's number of a type."""
    if dtype == BFLOAT16:
        return int(onnx.TensorProto.BFLOAT16)
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def type_name(onnx: ModuleType, element: int) -> str:
    """Returns the name of one of ONNX's types."""
    if element == onnx.TensorProto.BFLOAT16:
        return BFLOAT16
    return str(onnx.helper.tensor_dtype_to_np_dtype(element).name)


def refuse(node: Node, why: str) -> NoReturn:
    raise ValueError(f"export_onnx cannot export {node.name} ({node.op}): {why}")


class Row(NamedTuple):
    """How an operator is written in ONNX.

    Attributes:
        write: adds its nodes, and returns the names of its outputs.
        wide: whether, for float16, it computes in float32 and rounds its result once, as MXNet
            does. Others are one ONNX operator that computes in float16. For bfloat16, which few of
            ONNX's operators support, all compute in float32.
    """
    write: Callable[["Operator"], Any]
    wide: bool


class Writer:
    """The nodes and constants so far, and the names of the tensors of MXNet's graph."""

    def __init__(self, onnx: ModuleType, types: Mapping[Entry, Optional[str]],
                 shapes: Mapping[Entry, Tuple[int, ...]], constants: Mapping[Entry, Any],
                 outputs: List[str]):
        self.onnx, self.types, self.shapes, self.constants = onnx, types, shapes, constants
        self.nodes: List[Any] = []
        self.initializers: List[Any] = []
        self.names: Dict[Entry, str] = {}
        self.outputs = outputs
        self._taken: Set[str] = set(outputs)

    def unique(self, name: str) -> str:
        unique = next(one for one in (f"{name}_{i}" if i else name for i in count())
                    if one not in self._taken)
        self._taken.add(unique)
        return unique

    def constant(self, value: Any, name: str, dtype: Optional[str] = None) -> str:
        unique = self.unique(name)
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        if dtype == BFLOAT16:  # the upper half of each float32 number
            halves = (array.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
            tensor = self.onnx.helper.make_tensor(unique, element_type(self.onnx, dtype),
                                                  array.shape, halves.tobytes(), raw=True)
        else:
            tensor = self.onnx.numpy_helper.from_array(array, unique)
        self.initializers.append(tensor)
        return unique

    def add(self, op: str, inputs: List[str], names: List[str], **attributes: Any) -> List[str]:
        outputs = [self.unique(name) for name in names]
        self.nodes.append(self.onnx.helper.make_node(op, inputs, outputs, name=outputs[0],
                                                     **attributes))
        return outputs

    def cast(self, name: str, dtype: str) -> str:
        return self.add("Cast", [name], [f"{name}_{dtype}"],
                        to=element_type(self.onnx, dtype))[0]

    def read(self, entry: Entry) -> str:
        """Returns the tensor's name; writes a constant on its first use."""
        if entry not in self.names:
            output = f"_{entry.output}" if entry.output else ""
            self.names[entry] = self.constant(self.constants[entry], entry.node.name + output,
                                              self.types[entry])
        return self.names[entry]

    def write(self, node: Node, row: Row) -> None:
        """Adds a node of MXNet."""
        entries = list(takewhile(self.types.__contains__, (Entry(node, i) for i in count())))
        low = {*TYPES_16BIT} & {self.types[e] for e in (*node.inputs, *entries)}
        widened = bool(low) and (row.wide or BFLOAT16 in low and node.op not in CASTS)
        operator, before = Operator(self, node, widened), len(self.nodes)
        outputs = row.write(operator)
        outputs = [outputs] if isinstance(outputs, str) else outputs
        if operator.unread:
            name = min(operator.unread)
            refuse(node, f"ONNX has no equivalent of its attribute {name}={node.attrs[name]}")
        for entry, name in zip(entries, outputs):
            dtype = self.types[entry]
            if widened and dtype in TYPES_16BIT:
                name = self.cast(name, dtype)
            number = str(entry.output) if len(outputs) > 1 else ""
            self.names[entry] = self._renamed(name, f"{node.name}_output{number}", before)

    def remove_unread(self) -> None:
        """Removes nodes and constants that no output depends on, such as a fixed gamma and its
        cast."""
        read, nodes = set(self.outputs), []
        for node in reversed(self.nodes):  # each is behind those that it reads
            if read.intersection(node.output):
                read.update(node.input)
                nodes.append(node)
        self.nodes = nodes[::-1]
        self.initializers = [one for one in self.initializers if one.name in read]

    def _renamed(self, old: str, name: str, first: int) -> str:
        """Renames a tensor to MXNet's name if one of the new nodes computes it."""
        nodes = self.nodes[first:]
        if not any(old in node.output for node in nodes):
            return old
        new = self.unique(name)
        for node in nodes:
            for names in (node.input, node.output):
                names[:] = [new if one == old else one for one in names]
        return new


class Operator:
    """A node of MXNet during its export."""

    def __init__(self, writer: Writer, node: Node, widened: bool):
        self.writer, self.node = writer, node
        self.unread = {name for name in node.attrs if not name.startswith("__")} - _IGNORED
        self._widened = widened

    def __len__(self) -> int:
        return len(self.node.inputs)

    @property
    def dtype(self) -> DType:
        """The type in which it computes."""
        return np.dtype("float32" if self._widened else self.writer.types[self.node.inputs[0]])

    @property
    def x(self) -> List[str]:
        """The names of its inputs."""
        return [self.input(i) for i in range(len(self))]

    def input(self, i: int) -> str:
        entry = self.node.inputs[i]
        name = self.writer.read(entry)
        if self._widened and self.writer.types[entry] in TYPES_16BIT:
            return self.writer.cast(name, "float32")
        return name

    def value(self, i: int) -> Any:
        """Returns the values of an input that is a parameter."""
        entry = self.node.inputs[i]
        if entry not in self.writer.constants:
            self.refuse(f"its input {entry.node.name} is no parameter")
        return self.writer.constants[entry]

    def shape(self, i: int = 0) -> Tuple[int, ...]:
        return self.writer.shapes[self.node.inputs[i]]

    def input_type(self, i: int) -> str:
        return str(self.writer.types[self.node.inputs[i]])

    def output_type(self, i: int) -> str:
        return str(self.writer.types[Entry(self.node, i)])

    @property
    def made_type(self) -> str:
        """The type of its first output, in which it computes if that has 16 bits."""
        dtype = self.output_type(0)
        return "float32" if self._widened and dtype in TYPES_16BIT else dtype

    @property
    def made_shape(self) -> Tuple[int, ...]:
        return self.writer.shapes[Entry(self.node)]

    def refuse(self, why: str) -> NoReturn:
        refuse(self.node, why)

    # ---- attributes

    def text(self, name: str, default: str = "None") -> str:
        self.unread.discard(name)
        return str(self.node.attrs.get(name, default))

    def flag(self, name: str, default: bool = False) -> bool:
        text = self.text(name)
        return default if text == "None" else text in ("True", "1", "true")

    def number(self, name: str, default: float = 0.0) -> float:
        return float(self.text(name, repr(default)))

    def whole(self, name: str, default: int = 0) -> int:
        return int(self.text(name, str(default)))

    def several(self, name: str, default: Tuple[int, ...] = ()) -> Tuple[Any, ...]:
        """Returns a tuple of integers; a single integer becomes a tuple of one."""
        numbers = ast.literal_eval(self.text(name, "()").replace("L", ""))
        if numbers is None:
            return default
        return (tuple(numbers) if isinstance(numbers, (tuple, list)) else (numbers,)) or default

    def unset(self, *names: str) -> None:
        """Refuses these attributes if they are set."""
        for name in names:
            self.only(name, "False", "0")

    def only(self, name: str, *valid: str) -> None:
        """Refuses other values of this attribute; the first one is the default."""
        text = self.text(name, valid[0])
        if text not in valid:
            self.refuse(f"{name} must be {' or '.join(valid)}. Received: {text}")

    def ignore(self, *names: str) -> None:
        """Ignores attributes that do not change predictions."""
        self.unread.difference_update(names)

    def axis(self, name: str = "axis", default: int = -1, dims: Optional[int] = None) -> int:
        axis = self.whole(name, default)
        return axis % (len(self.shape()) if dims is None else dims)

    # ---- nodes

    def constant(self, value: Any, dtype: Optional[DType] = None) -> str:
        """Adds a constant, by default of the type in which the operator computes."""
        return self.writer.constant(np.asarray(value, dtype or self.dtype),
                                    f"{self.node.name}_constant")

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.outputs(op, 1, *inputs, **attributes)[0]

    def outputs(self, op: str, number: int, *inputs: str, **attributes: Any) -> List[str]:
        """Adds an ONNX node with several outputs."""
        end = [""] if number == 1 else [str(i) for i in range(number)]
        return self.writer.add(op, list(inputs), [f"{self.node.name}_{op}{i}" for i in end],
                               **attributes)

    def reshape(self, name: str, shape: Tuple[int, ...]) -> str:
        return self.add("Reshape", name, self.constant(shape, "int64"))

    def slice(self, name: str, *columns: Any) -> str:
        """Adds a Slice, of begins, ends, axes, and steps other than 1."""
        return self.add("Slice", name, *(self.constant(column, "int64") for column in columns))

    def unsqueeze(self, name: str, axis: int) -> str:
        return self.add("Unsqueeze", name, self.constant([axis], "int64"))
