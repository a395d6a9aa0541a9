"""Random float32 graphs with NaN, infinities and large arrays, which run in another process.

`run` returns digests of each graph's outputs, gradients and states, of MXNet alone or with
gluon_amp imported. A graph is a list of calls, so that executors, CachedOps and imperative code run
the same one.
"""
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DIED = ["died"]

# ---- graphs: each call is the operator, its attributes, and the numbers of its inputs

UNARY = """exp log sqrt square abs sin arctan erf cbrt rsqrt sigmoid tanh relu negative expm1 log1p
    reciprocal softsign sign round floor identity BlockGrad hard_sigmoid gamma zeros_like""".split()
BINARY = """elemwise_add elemwise_sub elemwise_mul elemwise_div broadcast_maximum
    broadcast_minimum broadcast_hypot broadcast_greater""".split()
SCALAR = """_plus_scalar _mul_scalar _rminus_scalar _rdiv_scalar _maximum_scalar
    _power_scalar""".split()
TWICE = "sin square tanh sigmoid negative FullyConnected".split()


class RandomGraph:
    """A random graph: its calls, the shapes of all results, and its variables, of which some are
    states that operators update."""

    def __init__(self, random, kind):
        self.random, self.kind = random, kind
        self.calls, self.shapes, self.variables, self.states = [], {}, [], set()

    def variable(self, shape, is_state=False):
        self.shapes[len(self.shapes)] = tuple(int(n) for n in shape)
        self.variables.append(len(self.shapes) - 1)
        if is_state:
            self.states.add(self.variables[-1])
        return self.variables[-1]

    def call(self, op, inputs, result, outputs=1, **attrs):
        number = len(self.shapes)
        self.calls.append((op, attrs, inputs, number, outputs))
        for i in range(outputs):
            self.shapes[number + i] = tuple(int(n) for n in result)
        return number

    def chance(self, part):
        return self.random.rand() < part

    def one_of(self, choices):
        return choices[self.random.randint(len(choices))]

    def grow(self, x):
        """Adds one call to the graph that reads `x`; returns the number of its result."""
        shape = self.shapes[x]
        if self.kind == "twice":
            op = self.one_of(TWICE)
            if op == "FullyConnected":
                return self.dense(x, shape)
            return self.call(op, [x], shape)
        choices = [self.unary, self.unary, self.binary, self.scalar]
        choices += {2: [self.dense, self.softmax, self.layer_norm, self.norm, self.dropout,
                        self.rows, self.split],
                    3: [self.dense, self.softmax, self.layer_norm, self.batch_dot, self.transpose,
                        self.rnn, self.loop, self.mask, self.reduce],
                    4: [self.convolution, self.convolution, self.deconvolution, self.pooling,
                        self.pooling, self.norm, self.norm, self.activation, self.dropout, self.lrn,
                        self.instance_norm, self.pad, self.split, self.flatten, self.reduce],
                    5: [self.convolution, self.convolution, self.pooling, self.norm,
                        self.activation, self.flatten]}.get(len(shape), [])
        return self.one_of(choices)(x, shape)

    def unary(self, x, shape):
        return self.call(self.one_of(UNARY), [x], shape)

    def binary(self, x, shape):
        others = [n for n, other in self.shapes.items() if other == shape and n not in self.states]
        return self.call(self.one_of(BINARY), [x, self.one_of(others)], shape)

    def scalar(self, x, shape):
        return self.call(self.one_of(SCALAR), [x], shape, scalar=self.one_of([2, .5, 3, 1e20]))

    def dense(self, x, shape):
        flat, units = len(shape) == 2, self.random.randint(1, 9)
        inputs = [x, self.variable((units, shape[-1]))]
        bias = self.chance(.7)
        if bias:
            inputs.append(self.variable((units,)))
        return self.call("FullyConnected", inputs, (*shape[:-1], units), num_hidden=units,
                         flatten=flat, no_bias=not bias)

    def softmax(self, x, shape):
        return self.call(self.one_of(["softmax", "log_softmax"]), [x], shape,
                         axis=self.random.randint(len(shape)))

    def layer_norm(self, x, shape):
        inputs = [x, self.variable(shape[-1:]), self.variable(shape[-1:])]
        return self.call("LayerNorm", inputs, shape)

    def norm(self, x, shape):
        channels = shape[1:2]
        inputs = [x, self.variable(channels), self.variable(channels),
                  self.variable(channels, True), self.variable(channels, True)]
        return self.call("BatchNorm", inputs, shape, fix_gamma=self.chance(.5),
                         use_global_stats=self.chance(.2), momentum=.5)

    def instance_norm(self, x, shape):
        return self.call("InstanceNorm", [x, self.variable(shape[1:2]), self.variable(shape[1:2])],
                         shape)

    def dropout(self, x, shape):
        return self.call("Dropout", [x], shape, p=.5)

    def rows(self, x, shape):
        return self.call("Reshape", [x], (*shape, 1), shape=(0, 0, 1))

    def flatten(self, x, shape):
        size = 1
        for n in shape[1:]:
            size *= n
        return self.call("Flatten", [x], (shape[0], size))

    def split(self, x, shape):
        parts = [n for n in (2, 3) if shape[1] % n == 0]
        if not parts:
            return self.unary(x, shape)
        width = shape[1] // parts[0]
        first = self.call("SliceChannel", [x], (shape[0], width, *shape[2:]), parts[0],
                          num_outputs=parts[0], axis=1)
        return self.call("Concat", [first, x], (shape[0], width + shape[1], *shape[2:]), dim=1,
                         num_args=2)

    def batch_dot(self, x, shape):
        return self.call("batch_dot", [x, x], (shape[0], shape[1], shape[1]), transpose_b=True)

    def transpose(self, x, shape):
        return self.call("transpose", [x], (shape[1], shape[0], shape[2]), axes=(1, 0, 2))

    def mask(self, x, shape):
        return self.call("SequenceReverse", [x], shape)

    def reduce(self, x, shape):
        op = self.one_of(["sum", "mean", "max", "prod", "norm"])
        return self.call(op, [x], (shape[0], 1, *shape[2:]), axis=1, keepdims=True)

    def rnn(self, x, shape):
        mode, size = self.one_of(["lstm", "gru", "rnn_tanh"]), 3
        gates = {"lstm": 4, "gru": 3, "rnn_tanh": 1}[mode]
        inputs = [x, self.variable((gates * size * (shape[2] + size + 2),)),
                  self.variable((1, shape[1], size))]
        if mode == "lstm":
            inputs.append(self.variable((1, shape[1], size)))
        return self.call("RNN", inputs, (*shape[:2], size), mode=mode, state_size=size,
                         num_layers=1)

    def loop(self, x, shape):
        return self.call(self.one_of(["foreach", "while_loop"]), [x, self.variable(shape[1:])],
                         shape)

    def convolution(self, x, shape):
        axes, filters = len(shape) - 2, self.one_of([1, 4, 16])
        kernel = tuple(self.one_of([1, 2, 3]) if n > 2 else 1 for n in shape[2:])
        stride, pad = self.one_of([1, 2]), self.one_of([0, 1])
        bias = self.chance(.5)
        inputs = [x, self.variable((filters, shape[1], *kernel))]
        if bias:
            inputs.append(self.variable((filters,)))
        result = [(n + 2 * pad - k) // stride + 1 for n, k in zip(shape[2:], kernel)]
        return self.call("Convolution", inputs, (shape[0], filters, *result), kernel=kernel,
                         num_filter=filters, stride=(stride,) * axes, pad=(pad,) * axes,
                         no_bias=not bias)

    def deconvolution(self, x, shape):
        filters = self.one_of([1, 4])
        return self.call("Deconvolution", [x, self.variable((shape[1], filters, 2, 2))],
                         (shape[0], filters, shape[2] + 1, shape[3] + 1), kernel=(2, 2),
                         num_filter=filters)

    def pooling(self, x, shape):
        if self.chance(.2):
            return self.call("Pooling", [x], (*shape[:2], *[1] * (len(shape) - 2)),
                             global_pool=True, pool_type=self.one_of(["max", "avg"]),
                             kernel=(1,) * (len(shape) - 2))
        kernel = tuple(min(2, n) for n in shape[2:])
        result = [(n - k) // 2 + 1 for n, k in zip(shape[2:], kernel)]
        return self.call("Pooling", [x], (*shape[:2], *result), kernel=kernel,
                         stride=(2,) * len(kernel), pool_type=self.one_of(["max", "avg"]))

    def activation(self, x, shape):
        act = self.one_of(["relu", "sigmoid", "tanh", "softrelu", "leaky", "elu", "gelu", "prelu"])
        if act in ("leaky", "elu", "gelu"):
            return self.call("LeakyReLU", [x], shape, act_type=act)
        if act == "prelu":
            return self.call("LeakyReLU", [x, self.variable(shape[1:2])], shape, act_type=act)
        return self.call("Activation", [x], shape, act_type=act)

    def lrn(self, x, shape):
        return self.call("LRN", [x], shape, nsize=3)

    def pad(self, x, shape):
        return self.call("Pad", [x], (*shape[:2], shape[2] + 2, shape[3] + 1), mode="constant",
                         pad_width=(0, 0, 0, 0, 1, 1, 0, 1), constant_value=1)


def graph_of(seed):
    """A random graph, and the number of its last result."""
    import numpy as np
    random = np.random.RandomState(seed)
    kind = ["executor", "static", "block", "imperative", "twice", "empty", "custom"][
        random.choice(7, p=[.24, .2, .16, .2, .08, .06, .06])]
    graph = RandomGraph(random, kind)
    shapes = {"twice": [(4, 5)], "empty": [(0, 3), (2, 0, 4)]}.get(
        kind, [(4, 5), (6, 12), (3, 4, 5), (2, 4, 8, 8), (2, 16, 9, 7), (1, 3, 4, 6, 5)])
    if kind in ("executor", "static") and graph.chance(.1):
        shapes = [(32, 16, 56, 56), (256, 2048)]
    x = graph.variable(shapes[random.randint(len(shapes))])
    for _ in range(random.randint(2, 9)):
        if max(n for s in graph.shapes.values() for n in s) > 4096:
            break
        x = graph.grow(x)
    return graph, x


# ---- runs, in the other process


def runner():
    import mxnet as mx
    import numpy as np
    from mxnet import autograd, nd

    class Double(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            self.assign(out_data[0], req[0], in_data[0] * 2)

        def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
            self.assign(in_grad[0], req[0], out_grad[0] * 2)

    @mx.operator.register("double_of_tests")
    class DoubleProp(mx.operator.CustomOpProp):
        def create_operator(self, ctx, shapes, dtypes):
            return Double()

    def loop_of(F, op, x, state):
        if op == "foreach":
            return F.contrib.foreach(lambda a, s: (F.tanh(a) + s, F.sin(s)), x, state)[0]
        total, _ = F.contrib.while_loop(
            lambda i, s: i < 2, lambda i, s: (s * 2, (i + 1, F.tanh(s))),
            (F.zeros((1,)), state), max_iterations=3)
        return F.broadcast_add(x, F.slice_axis(total, axis=0, begin=0, end=1))

    def evaluate(F, graph, arrays, last):
        values = dict(arrays)
        for op, attrs, inputs, number, outputs in graph.calls:
            given = [values[i] for i in inputs]
            if op in ("foreach", "while_loop"):
                values[number] = loop_of(F, op, *given)
                continue
            function = getattr(F, op, None) or getattr(F._internal, op)
            result = function(*given, **attrs)
            if outputs > 1:
                for i in range(outputs):
                    values[number + i] = result[i]
            else:
                values[number] = result[0] if isinstance(result, list) else result
        result = values[last]
        return F.Custom(result, op_type="double_of_tests") if graph.kind == "custom" else result

    def values_of(graph):
        random, values = graph.random, {}
        for number in graph.variables:
            shape = graph.shapes[number]
            value = random.standard_normal(shape).astype(np.float32)
            if number in graph.states:
                value = np.abs(value) + 1
            if value.size and graph.chance(.25):
                places = random.randint(value.size, size=1 + value.size // 50)
                value.flat[places] = random.choice([np.nan, np.inf, -np.inf, 1e30, -1e-40, 0],
                                                   len(places))
            values[number] = value
        return values

    def arrays_of(graph, requests):
        arrays = {n: nd.array(v) if v.size else nd.zeros(v.shape)
                  for n, v in values_of(graph).items()}
        for n, array in arrays.items():
            if n not in graph.states:
                array.attach_grad(requests[n])
        return arrays

    def results(graph, last):
        requests = {n: "null" if n in graph.states or graph.chance(.1)
                    else "add" if graph.chance(.15) else "write" for n in graph.variables}
        requests[0] = "write"
        is_train = graph.chance(.75)
        if graph.kind in ("executor", "custom"):
            variables = {n: mx.sym.var(f"v{n}") for n in graph.variables}
            symbol = evaluate(mx.sym, graph, variables, last)
            names = {f"v{n}" for n in graph.variables}
            there = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
            executor = symbol.simple_bind(
                mx.cpu(), {f"v{n}": r for n, r in requests.items() if f"v{n}" in there},
                **{f"v{n}": graph.shapes[n] for n in graph.variables if f"v{n}" in there})
            for n, value in values_of(graph).items():
                for group in (executor.arg_dict, executor.aux_dict):
                    if f"v{n}" in group:
                        group[f"v{n}"][:] = nd.array(value)
            assert names >= {*there}
            for _ in range(2):
                out, = executor.forward(is_train=is_train)
                yield out
                if is_train:
                    executor.backward(nd.ones(out.shape))
                    yield from (g for g in executor.grad_arrays if g is not None)
                yield from executor.aux_arrays
            return
        arrays = arrays_of(graph, requests)
        def run(given):
            return evaluate(nd, graph, given, last)
        if graph.kind in ("static", "block"):
            variables = {n: mx.sym.var(f"v{n}") for n in graph.variables}
            symbol = evaluate(mx.sym, graph, variables, last)
            names = symbol.list_inputs()
            flags = {"static_alloc": True, "static_shape": graph.chance(.5)} \
                if graph.kind == "static" else {}
            op = nd.CachedOp(symbol, [*flags.items()])
            def run(given):
                return op(*(given[int(name[1:])] for name in names))
        for _ in range(2):
            with autograd.record(train_mode=is_train):
                out = run(arrays)
                if graph.kind == "twice":
                    slope = autograd.grad(out, arrays[graph.variables[0]], create_graph=True,
                                          retain_graph=True)[0]
                    yield slope
                    out = slope.square()
            yield out
            out.backward(train_mode=is_train)
            yield from (a.grad for a in arrays.values() if a.grad is not None)
            yield from (arrays[n] for n in sorted(graph.states))

    def digest(seed):
        graph, last = graph_of(seed)
        mx.random.seed(seed)
        lines = []
        try:
            with mx.util.np_shape(graph.kind == "empty"):
                for array in results(graph, last):
                    value = array.asnumpy()
                    lines.append(f"{value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}")
                nd.waitall()
        except Exception as error:  # compared, too
            lines.append(type(error).__name__)
        return lines

    return digest


def main(path, first, after):
    """Writes a line for each graph."""
    digest = runner()
    with open(path, "a") as file:
        for seed in range(int(first), int(after)):
            file.write(json.dumps([seed, None]) + "\n")  # it may end the process
            file.flush()
            file.write(json.dumps([seed, digest(seed)]) + "\n")
            file.flush()
    os._exit(0)  # MXNet alone may wait for ever for its Custom operators


def run(start, path, count, first=0, **variables):
    """The digest of each graph, `DIED` if it ended its process.

    Args:
        start: the code before the import of MXNet.
        path: a file for the results.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MXNET_SAFE_ACCUMULATION": "1",
           "MXNET_SUBGRAPH_VERBOSE": "0", **variables}
    digests, seed = {}, first
    while seed < first + count:
        code = f"{start}\nimport sys; sys.path.insert(0, {str(HERE)!r})\n" \
               "import float32_graphs; float32_graphs.main(*sys.argv[1:])"
        path.write_text("")
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(path), str(seed),
                               str(first + count)], env=env, capture_output=True, text=True,
                              timeout=600)
        digests.update(map(json.loads, path.read_text().splitlines()))
        assert seed in digests, done.stderr[-3000:]
        if done.returncode == 0:
            break
        seed = max(digests)
        digests[seed] = DIED
        seed += 1
    return digests


def operators(seed):
    """The operators of a graph, and its kind."""
    graph, _ = graph_of(seed)
    return {call[0] for call in graph.calls} | {graph.kind}
