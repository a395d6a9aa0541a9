"""Builds an ONNX model for any batch size from the models of a few batch sizes.

The models have the same nodes. A constant or shape that differs depends on the batch size. In the
shape of a Reshape, that size becomes -1. A constant of equal numbers, such as an RNN's initial
state, is expanded to the batch size of the data. Anything else is refused.
"""
from types import ModuleType
from typing import Any, List, Mapping, Optional, Sequence

import numpy as np

NAME = "batch"  # of the size, in the file
SIZES = (3, 5, 1)  # of which models are compared; some operators treat an axis of 1 as none

_REFUSED = "export_onnx cannot export this network for any batch size (None in shapes): "


def refuse_batch(why: str) -> ValueError:
    return ValueError(_REFUSED + why)


def any_batch(onnx: ModuleType, models: Sequence[Any], shapes: Mapping[str, Any]) -> Any:
    """Returns the first model, changed to one for any batch size.

    Args:
        onnx: the package onnx.
        models: the models of the batch sizes SIZES.
        shapes: the shapes of the inputs, with None for the batch size.

    Raises:
        ValueError: a node depends on the batch size in another way.
    """
    graph, *others = (model.graph for model in models)
    for other in others:
        for one, two in zip(graph.node, other.node):
            if one != two:
                raise refuse_batch(f"{one.name} ({one.op_type}) has it in its attributes")
    shaping = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
    reading = {name for node in graph.node for i, name in enumerate(node.input)
               if (node.op_type, i) != ("Reshape", 1)}
    data, axis = next((name, shape.index(None)) for name, shape in shapes.items() if None in shape)
    expanded = _Expanded(onnx, data, axis)
    for constants in zip(list(graph.initializer), *(other.initializer for other in others)):
        first, name = constants[0], constants[0].name
        if all(one == first for one in constants):
            continue
        values = list(map(onnx.numpy_helper.to_array, constants))
        if name in shaping - reading:
            first.CopyFrom(onnx.numpy_helper.from_array(_inferred(values, name), name))
        else:
            graph.initializer.remove(first)
            expanded.add(values, name, first.data_type)
    graph.initializer.extend(expanded.constants)
    nodes = [*expanded.nodes, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for one, two in zip([*graph.input, *graph.output], [*others[0].input, *others[0].output]):
        for size, other in zip(one.type.tensor_type.shape.dim, two.type.tensor_type.shape.dim):
            if size.dim_value != other.dim_value:
                times = size.dim_value / SIZES[0]
                size.dim_param = NAME if times == 1 else f"{times:g}*{NAME}"
    return models[0]


def _inferred(shapes: List[Any], name: str) -> Any:
    """Returns the shape of a Reshape, with -1 for the size that differs."""
    first = shapes[0]
    if any(len(shape) != len(first) for shape in shapes):
        raise refuse_batch(f"the shape {name} has fewer axes for a batch of 1")
    differ = np.any([shape != first for shape in shapes], axis=0)
    if differ.sum() != 1:
        raise refuse_batch(f"the shape {name} has several sizes that depend on it")
    return np.where(differ, -1, first)


class _Expanded:
    """Constants of equal numbers with the batch size as an axis, and the nodes that expand them."""

    def __init__(self, onnx: ModuleType, data: str, axis: int):
        self.onnx, self.data, self.axis = onnx, data, axis
        self.nodes: List[Any] = []
        self.constants: List[Any] = []
        self.batch: Optional[str] = None  # the tensor with the batch size

    def constant(self, value: Any, name: str) -> str:
        self.constants.append(self.onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op: str, inputs: List[str], name: str, **attributes: Any) -> str:
        self.nodes.append(self.onnx.helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def add(self, values: List[Any], name: str, element: int) -> None:
        """Adds a constant, given for each of SIZES, that is expanded to the data's batch size.
        onnxruntime does not expand bfloat16."""
        axes = list(zip(*(value.shape for value in values)))
        differ = [sizes for sizes in axes if len(set(sizes)) > 1]
        if len({value.ndim for value in values}) > 1 or differ != [SIZES] \
                or np.unique(values[0]).size > 1:
            raise refuse_batch(f"the constant {name} depends on it")
        if self.batch is None:
            read = self.node("Shape", [self.data], f"{NAME}/shape")
            self.batch = self.node("Gather", [read, self.constant([self.axis], f"{NAME}/axis")],
                                   f"{NAME}/size")
        shape, at = np.array(values[0].shape, np.int64), axes.index(SIZES)
        sizes = self.node("Concat", [self.constant(shape[:at], f"{name}/before"), self.batch,
                                    self.constant(shape[at + 1:], f"{name}/behind")],
                         f"{name}/shape", axis=0)
        number = values[0].ravel()[0]
        if element != self.onnx.TensorProto.BFLOAT16:
            self.node("Expand", [self.constant(number, f"{name}/number"), sizes], name)
            return
        wide = self.node("Expand", [self.constant(np.float32(number), f"{name}/number"), sizes],
                         f"{name}/float32")
        self.node("Cast", [wide], name, to=element)
