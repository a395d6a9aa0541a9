"""Kinds of recurrent layers, run by MXNet's operator, and LSTMs unrolled on a CPU."""
import itertools
from typing import NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

STEPS, BATCH, INPUT, HIDDEN = 5, 3, 6, 4
GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}


class Case(NamedTuple):
    """A recurrent layer. MXNet's CPU operator has none of the last three."""
    mode: str
    layers: int = 1
    ways: int = 1
    projection: Optional[int] = None
    clip: Optional[Tuple[float, float]] = None
    lengths: Optional[Tuple[int, ...]] = None

    @property
    def out(self):
        return self.projection or HIDDEN

    @property
    def runs_on_cpus(self):
        return not (self.projection or self.clip or self.lengths)

    def __str__(self):
        words = [self.mode, f"{self.layers} layers"]
        words += ["bidirectional"] * (self.ways == 2)
        words += [name for name in self._fields[3:] if getattr(self, name)]
        return ", ".join(words)


CASES = [Case(mode, layers, ways)
         for mode, layers, ways in itertools.product(GATES, (1, 2), (1, 2))]
CASES += [Case("lstm", 2, ways, projection, clip, lengths) for ways, (projection, clip, lengths)
          in itertools.product((1, 2), [(2, None, None), (None, (-.2, .1), None),
                                        (None, None, (5, 2, 3)), (2, (-.2, .1), (1, 5, 2))])]
CASES += [Case("gru", 2, 2, lengths=(3, 5, 1)), Case("rnn_tanh", 1, 2, lengths=(4, 4, 5))]


def shapes(case):
    """The shapes of weights in MXNet's order: all matrices, then all biases."""
    rows = GATES[case.mode] * HIDDEN
    matrices, biases = [], []
    for layer in range(case.layers):
        for _ in range(case.ways):
            matrices += [(rows, case.out * case.ways if layer else INPUT), (rows, case.out)]
            matrices += [(case.projection, HIDDEN)] if case.projection else []
            biases += [(rows,), (rows,)]
    return matrices, biases


def drawn(case):
    """Data, weights, states, and gradients of the outputs."""
    random = np.random.RandomState(0)
    places = case.layers * case.ways
    weights = sum(int(np.prod(shape)) for part in shapes(case) for shape in part)
    inputs = [random.randn(STEPS, BATCH, INPUT), random.uniform(-.6, .6, weights),
              random.randn(places, BATCH, case.out)]
    heads = [random.randn(STEPS, BATCH, case.out * case.ways),
             random.randn(places, BATCH, case.out)]
    if case.mode == "lstm":
        inputs.append(random.randn(places, BATCH, HIDDEN) * .2)
        heads.append(random.randn(places, BATCH, HIDDEN))
    return inputs, heads


def results(case, context, dtype="float32", run=None):
    """Outputs, and gradients of the inputs."""
    inputs, heads = ([nd.array(array, ctx=context, dtype=dtype) for array in arrays]
                     for arrays in drawn(case))
    for array in inputs:
        array.attach_grad()
    with autograd.record():
        outputs = (run or operator)(case, *inputs)
    autograd.backward(outputs, heads)
    arrays = [*outputs, *(array.grad for array in inputs)]
    return [array.asnumpy().astype("float64") for array in arrays]


def operator(case, *inputs):
    settings = {"mode": case.mode, "state_size": HIDDEN, "num_layers": case.layers,
                "bidirectional": case.ways == 2, "state_outputs": True}
    if case.projection:
        settings["projection_size"] = case.projection
    if case.clip:
        settings["lstm_state_clip_min"], settings["lstm_state_clip_max"] = case.clip
    if case.lengths:
        settings["use_sequence_length"] = True
        inputs += (nd.array(case.lengths, ctx=inputs[0].context, dtype=inputs[0].dtype),)
    return mx.nd.RNN(*inputs, **settings)


def unrolled(case, x, weights, *states):
    """The same layer by elementary operators, one sequence after the other."""
    parts = []
    for shape in itertools.chain(*shapes(case)):
        size = int(np.prod(shape))
        parts.append(weights[:size].reshape(shape))
        weights = weights[size:] if weights.size > size else None
    each = 3 if case.projection else 2  # matrices of a direction
    biases = parts[each * case.layers * case.ways:]
    made = []
    for sequence, length in enumerate(case.lengths or [STEPS] * BATCH):
        data, last = [x[t, sequence] for t in range(length)], []
        for layer in range(case.layers):
            sides = []
            for way in range(case.ways):
                place = layer * case.ways + way
                order = slice(None, None, -1 if way else 1)
                side, *end = _direction(case, data[order], [s[place, sequence] for s in states],
                                        parts[each * place:each * (place + 1)],
                                        biases[2 * place:2 * place + 2])
                sides.append(side[order])
                last.append(end)
            data = [nd.concat(*step, dim=0) for step in zip(*sides)]
        data += [nd.zeros_like(data[0])] * (STEPS - length)
        made.append((nd.stack(*data), *(nd.stack(*state) for state in zip(*last))))
    return [nd.stack(*arrays, axis=1) for arrays in zip(*made)]


def _direction(case, data, states, matrices, biases):
    """The outputs of a direction of a layer, and its last states."""
    outputs, (h, *c) = [], states
    for x in data:
        a, b = nd.dot(matrices[0], x) + biases[0], nd.dot(matrices[1], h) + biases[1]
        if case.mode == "lstm":
            i, f, g, o = nd.split(a + b, 4, axis=0)
            cell = f.sigmoid() * c[0] + i.sigmoid() * g.tanh()
            c = [cell.clip(*case.clip) if case.clip else cell]
            h = o.sigmoid() * c[0].tanh()
            h = nd.dot(matrices[2], h) if case.projection else h
        elif case.mode == "gru":
            (r, z, g), (s, y, k) = (nd.split(both, 3, axis=0) for both in (a, b))
            z = (z + y).sigmoid()
            h = (1 - z) * (g + (r + s).sigmoid() * k).tanh() + z * h
        else:
            h = (a + b).tanh() if case.mode == "rnn_tanh" else (a + b).relu()
        outputs.append(h)
    return (outputs, h, *c)


def difference(case, context, dtype="float32"):
    """The largest difference from the CPU, relative to the largest number of each array."""
    expected = results(case, mx.cpu(), run=None if case.runs_on_cpus else unrolled)
    pairs = zip(results(case, context, dtype), expected)
    return max(np.abs(one - other).max() / np.abs(other).max() for one, other in pairs)
