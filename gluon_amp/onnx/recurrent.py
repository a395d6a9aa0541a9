"""MXNet's RNN operator in ONNX: one operator for each layer.

MXNet stores all parameters of all layers in one vector: first the weights of each layer and
direction (input to hidden, then hidden to hidden), then their biases in the same order. ONNX has
another order of gates, and both directions in one array.
"""
from typing import Any, Dict, List

import numpy as np

from .writer import Operator

# MXNet's mode: ONNX's operator and activation, and the index in MXNet of each of ONNX's gates
_KINDS = {"lstm": ("LSTM", "", (0, 3, 1, 2)), "gru": ("GRU", "", (1, 0, 2)),
          "rnn_tanh": ("RNN", "Tanh", (0,)), "rnn_relu": ("RNN", "Relu", (0,))}


def recurrent(node: Operator) -> List[str]:
    node.unset("use_sequence_length", "lstm_state_clip_nan")
    for name in ("projection_size", "lstm_state_clip_min", "lstm_state_clip_max"):
        node.only(name, "None")
    node.ignore("p", "state_outputs")
    mode = node.text("mode")
    op, activation, order = _KINDS[mode]
    directions = 2 if node.flag("bidirectional") else 1
    layers, hidden = node.whole("num_layers"), node.whole("state_size")
    steps, batch, _ = node.shape()
    more: Dict[str, Any] = {"direction": "bidirectional" if directions == 2 else "forward"}
    if activation:
        more["activations"] = [activation] * directions
    if mode == "gru":
        more["linear_before_reset"] = 1

    states = [[x] if layers == 1 else node.outputs("Split", layers, x, axis=0)
              for x in node.x[2:]]
    weights = _weights(node, layers, directions, len(order), hidden, order)
    x, last = node.input(0), []
    for layer in range(layers):
        arrays = [node.constant(array) for array in weights[layer]]
        outputs = node.outputs(op, 1 + len(states), x, *arrays, "",
                            *(state[layer] for state in states), hidden_size=hidden, **more)
        # (steps, directions, batch, hidden): joins the directions in the last axis
        turned = node.add("Transpose", outputs[0], perm=(0, 2, 1, 3))
        x = node.reshape(turned, (steps, batch, directions * hidden))
        last.append(outputs[1:])
    return [x, *(node.add("Concat", *(outputs[i] for outputs in last), axis=0)
                 for i in range(len(states)))]


def _weights(node: Operator, layers: int, directions: int, gates: int, hidden: int,
             order: Any) -> List[List[Any]]:
    """Returns for each layer the input weights, the state weights, and the biases of both."""
    vector = node.value(1).ravel()
    at = 0

    def take(*shape: int) -> Any:
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return vector[at - size:at].reshape((gates, hidden, *shape[1:]))[list(order)].reshape(shape)

    rows, inputs = gates * hidden, node.shape()[2]
    stacked: List[List[Any]] = []
    for layer in range(layers):
        size = inputs if layer == 0 else directions * hidden
        pairs = [(take(rows, size), take(rows, hidden)) for _ in range(directions)]
        stacked.append([np.stack(arrays) for arrays in zip(*pairs)])
    for layer in range(layers):
        pairs = [np.concatenate([take(rows), take(rows)]) for _ in range(directions)]
        stacked[layer].append(np.stack(pairs))
    if at != vector.size:
        node.refuse(f"it has {vector.size} parameters. Expected: {at}")
    return stacked
