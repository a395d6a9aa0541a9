"""`gluon-amp doctor --verify`: compares a GPU's results with the CPU's, in under two minutes.

Operators run forward and backward, and small networks train some steps, in float32 and float16. The
reference is the CPU's float32 result for the same inputs, rounded to the type that is verified.
"""
import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import mxnet as mx
import numpy as np

from ..annotations import Array, Context
from ..checks import aligned, counted, message
from ..version import __version__
from .demo import Run, network

SECONDS = 110.0  # no other case starts after this time
TYPES = ("float32", "float16")
# The largest difference, relative to the largest number of the reference. Float32 products may
# round their inputs to TF32, and losses of a network sum the errors of all its layers.
_BOUNDS = {"float32": 4e-3, "float16": 2e-2}
_STEPS = 4


def _operators() -> List[Tuple[str, Callable[..., Array], Sequence[Tuple[int, ...]]]]:
    """Returns a name, a function, and the shapes of its inputs for each operator."""
    nd = mx.nd
    return [
        ("a * b + a", lambda a, b: a * b + a, [(64, 100)] * 2),
        ("broadcast_add", lambda a, b: nd.broadcast_add(a, b), [(64, 100), (1, 100)]),
        ("exp, sqrt, tanh", lambda a: nd.tanh(nd.sqrt(nd.exp(a))), [(64, 100)]),
        ("sum", lambda a: a.sum(axis=1), [(64, 1000)]),
        ("max", lambda a: a.max(axis=0), [(64, 1000)]),
        ("softmax", lambda a, b: nd.softmax(a) * b, [(64, 1000)] * 2),
        ("log_softmax", lambda a: nd.log_softmax(a), [(64, 100)]),
        ("LayerNorm", lambda a, g, b: nd.LayerNorm(a, g, b), [(64, 768), (768,), (768,)]),
        ("BatchNorm", _batch_norm, [(16, 32, 14, 14), (32,), (32,)]),
        ("dot", lambda a, b: nd.dot(a, b), [(64, 128), (128, 96)]),
        ("batch_dot", lambda a, b: nd.batch_dot(a, b), [(8, 64, 32), (8, 32, 64)]),
        ("FullyConnected", lambda a, w, b: nd.FullyConnected(a, w, b, num_hidden=96),
         [(64, 128), (96, 128), (96,)]),
        ("Convolution", lambda a, w, b: nd.Convolution(
            a, w, b, kernel=(3, 3), pad=(1, 1), num_filter=32),
         [(4, 16, 28, 28), (32, 16, 3, 3), (32,)]),
        ("depthwise Convolution", lambda a, w: nd.Convolution(
            a, w, no_bias=True, kernel=(3, 3), pad=(1, 1), num_filter=16, num_group=16),
         [(4, 16, 28, 28), (16, 1, 3, 3)]),
        ("Deconvolution", lambda a, w: nd.Deconvolution(
            a, w, kernel=(2, 2), stride=(2, 2), num_filter=8), [(4, 16, 14, 14), (16, 8, 2, 2)]),
        ("average Pooling", lambda a: nd.Pooling(
            a, kernel=(2, 2), stride=(2, 2), pool_type="avg"), [(4, 16, 28, 28)]),
        ("max Pooling", lambda a: nd.Pooling(
            a, kernel=(3, 3), stride=(2, 2), pool_type="max"), [(4, 16, 28, 28)]),
        ("LeakyReLU (gelu)", lambda a: nd.LeakyReLU(a, act_type="gelu"), [(64, 100)]),
        ("transpose, slice, concat", lambda a: nd.concat(
            a.T.slice_axis(0, 3, 50), a.T, dim=0), [(64, 100)]),
        ("Embedding", lambda w: nd.Embedding(
            nd.array([[1, 2, 2], [0, 5, 9]], ctx=w.ctx), w, 10, 16), [(10, 16)]),
        ("take", lambda w: nd.take(w, nd.array([1, 7, 3], ctx=w.ctx)), [(10, 16)]),
        ("where", lambda a, b: nd.where(a > b, a, b), [(64, 100)] * 2),
    ]


def _batch_norm(data: Array, gamma: Array, beta: Array) -> Array:
    float32 = [each.astype("float32") for each in (gamma, beta)]
    mean, variance = mx.nd.zeros(32, data.ctx), mx.nd.ones(32, data.ctx)
    return mx.nd.BatchNorm(data, *float32, mean, variance, fix_gamma=False)


def _networks() -> List[Tuple[str, Callable[[], Any], Tuple[int, ...]]]:
    """Returns a name, a function, and the shape of a batch for each network."""
    nn, rnn = mx.gluon.nn, mx.gluon.rnn

    def sequential(*layers: Any) -> Any:
        net = nn.HybridSequential()
        net.add(*layers)
        return net

    return [("convolutions, batch norm", network, (16, 1, 16, 16)),
            ("dense, layer norm", lambda: sequential(
                nn.Dense(128, "relu"), nn.LayerNorm(), nn.Dense(64), nn.GELU(), nn.Dense(10)),
             (32, 64)),
            ("LSTM", lambda: sequential(rnn.LSTM(32, layout="NTC"), nn.Dense(10)), (16, 12, 24))]


def verify(device: Context) -> Dict[str, Any]:
    """Returns the facts of all cases as JSON-serializable values.

    Each row has `case`, `type`, the `difference` from the CPU and its `bound`, and `error`: None,
    or why it fails.
    """
    begin = time.monotonic()
    rows: List[Dict[str, Any]] = []
    for case, dtype, run in _cases(device):
        bound = _BOUNDS[dtype]
        row: Dict[str, Any] = {"case": case, "type": dtype, "bound": bound, "difference": None,
                               "error": None}
        rows.append(row)
        if time.monotonic() - begin > SECONDS:
            row["error"] = f"not run: {SECONDS:g} s have passed"
            continue
        try:
            row["difference"] = run()
        except Exception as error:  # any error is the result
            row["error"] = message(error)
            continue
        if not row["difference"] <= bound:  # NaN, too
            row["error"] = "differs from the CPU"
    return {"gluon_amp": __version__, "mxnet": mx.__version__, "device": str(device),
            "seconds": round(time.monotonic() - begin, 1), "cases": rows,
            "failed": sum(row["error"] is not None for row in rows)}


def _cases(device: Context) -> Iterator[Tuple[str, str, Callable[[], float]]]:
    for name, operator, shapes in _operators():
        for dtype in TYPES:
            yield name, dtype, partial(_compare, operator, shapes, dtype, device)
    yield "sort", "float32", partial(_sorted, device)
    yield "random_normal", "float32", partial(_drawn, device)
    for name, make, shape in _networks():
        for dtype in TYPES:
            yield name, dtype, partial(_train, make, shape, dtype, device)


def _compare(operator: Callable[..., Array], shapes: Sequence[Tuple[int, ...]], dtype: str,
             device: Context) -> float:
    """Returns the largest difference of results and gradients from the CPU's."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    wanted = _passes(operator, [each.astype("float32") for each in inputs], mx.cpu())
    return max(map(_distance, _passes(operator, inputs, device), wanted))


def _passes(operator: Callable[..., Array], inputs: Sequence[Any], device: Context) -> List[Any]:
    arrays = [mx.nd.array(each, device, each.dtype) for each in inputs]
    for array in arrays:
        array.attach_grad()
    with mx.autograd.record():
        output = operator(*arrays)
    head = np.random.default_rng(1).standard_normal(output.shape)
    output.backward(mx.nd.array(head, device, output.dtype))
    return [array.astype("float32").asnumpy() for array in [output, *(a.grad for a in arrays)]]


def _distance(computed: Any, wanted: Any) -> float:
    return float(np.abs(computed - wanted).max() / max(np.abs(wanted).max(), 1e-6))


def _sorted(device: Context) -> float:
    values = np.random.default_rng(0).standard_normal((64, 1000)).astype("float32")
    return _distance(mx.nd.sort(mx.nd.array(values, device), axis=1).asnumpy(), np.sort(values, 1))


def _drawn(device: Context) -> float:
    """Devices draw different numbers: compares the standard deviation of a million with 1."""
    drawn = mx.nd.random.normal(shape=(1000, 1000), ctx=device).asnumpy()
    return abs(float(drawn.std()) - 1)


def _train(make: Callable[[], Any], shape: Tuple[int, ...], dtype: str, device: Context) -> float:
    """Returns the largest difference of the losses of some steps from the CPU's in float32."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal(shape).astype("float32")
    label = rng.integers(10, size=len(data))

    def losses(kind: str, where: Context) -> Any:
        run = Run(make, kind, 0, where)
        x, y = mx.nd.array(data, where), mx.nd.array(label, where)
        return np.array([run.step(x, y).mean().asscalar() for _ in range(_STEPS)])

    return _distance(losses(dtype, device), losses("float32", mx.cpu()))


def describe(facts: Dict[str, Any]) -> str:
    """Returns the facts as a table, the conclusion first."""
    rows = [("case", "type", "difference", "bound", "")]
    for row in facts["cases"]:
        rows.append((row["case"], row["type"],
                     "" if row["difference"] is None else f"{row['difference']:.1e}",
                     f"{row['bound']:.0e}", row["error"] or "ok"))
    failed, total = facts["failed"], counted(len(facts["cases"]), "case")
    verdict = f"{failed} of {total} fail" if failed else f"all {total} agree with the CPU"
    conclusion = f"{facts['device']}: {verdict} ({facts['seconds']:g} s)."
    return "\n".join([conclusion, "", *aligned(rows)])
