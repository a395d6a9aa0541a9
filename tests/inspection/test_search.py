"""`search`: the fewest nodes to keep so that a network trains as in float32."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.graph.arithmetic import multiply_adds
from gluon_amp.graph.graph import Graph
from mxnet import gluon, nd
from mxnet.gluon import nn

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
BARE = amp.Policy("bare", parameter="float16", compute="float16", norm="float16",
                  sensitive="float16")
QUICK = {"steps": 4, "seeds": 1, "progress": False}


def root_mean_square(F, x):
    """A norm written by hand, whose squares overflow float16."""
    x = x * 512
    return F.broadcast_mul(x, F.rsqrt(F.mean(F.square(x), axis=1, keepdims=True) + 1))


def network(norm=None):
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(16, activation="relu", in_units=12))
        if norm:
            net.add(nn.HybridLambda(norm, prefix="norm_"))
        net.add(nn.Dropout(0.2), nn.Dense(4, in_units=16))
    net.initialize(mx.init.Xavier())
    return amp.convert(net, BARE)


def batches(count=3):
    rng = np.random.default_rng(0)
    return [(nd.array(rng.standard_normal((8, 12))), nd.array(rng.integers(0, 4, 8)))
            for _ in range(count)]


def test_search_finds_overflowing_nodes_and_keep_fixes_them():
    net = network(root_mean_square)
    assert amp.xray(net, batches(1), LOSS).findings
    found = amp.search(net, batches(), LOSS, budget=120.0, **QUICK)
    assert found.verified
    assert found.best.nodes <= {"net_norm__square0", "net_norm__mean0", "net_norm__rsqrt0",
                                "net_norm_square0", "net_norm_mean0", "net_norm_rsqrt0",
                                "net_norm__mulscalar0", "net_norm__plusscalar0"}
    assert found.best.share == 1.0
    assert found.best.snr >= 20
    amp.convert(net, BARE, keep=found.keep)
    assert amp.explain(net, batches(1)[0], LOSS) is None


def test_network_suitable_for_float16_keeps_nothing():
    found = amp.search(network(), batches(), LOSS, budget=120.0, **QUICK)
    assert (found.keep, found.verified, found.best.share) == ([], True, 1.0)


def test_products_are_kept_only_if_gradients_require_it():
    found = amp.search(network(), batches(), LOSS, budget=120.0, snr=1000.0, **QUICK)
    assert found.best.share == 0.0
    assert found.keep[:1] == ["net_dense0"]


def test_front_is_pareto_optimal_and_contains_best():
    found = amp.search(network(root_mean_square), batches(), LOSS, budget=120.0, **QUICK)
    front = found.front
    assert found.best in front
    values = [(c.snr, -c.casts, c.share, -len(c.nodes)) for c in front]
    assert len(front) > 1
    for mine in values:
        assert not any(other != mine and all(a >= b for a, b in zip(other, mine))
                       for other in values)


def test_weights_and_random_state_are_unchanged():
    net = network(root_mean_square)
    net(batches(1)[0][0])
    bits = [p.data().asnumpy().tobytes() for p in net.collect_params().values()]
    mx.random.seed(4)
    expected = nd.random.uniform(shape=5).asnumpy()
    mx.random.seed(4)
    amp.search(net, batches(), LOSS, budget=120.0, **QUICK)
    np.testing.assert_array_equal(nd.random.uniform(shape=5).asnumpy(), expected)
    assert [p.data().asnumpy().tobytes() for p in net.collect_params().values()] == bits


def test_search_resumes_from_file_with_same_result(tmp_path, capsys):
    file = str(tmp_path / "search.json")
    net = network(root_mean_square)
    first = amp.search(net, batches(), LOSS, budget=120.0, file=file, steps=4, seeds=1)
    told = capsys.readouterr().err
    assert "gradients at" in told
    assert "trained with" in told
    again = amp.search(net, batches(), LOSS, budget=120.0, file=file, **QUICK)
    assert (again.keep, again.verified, again.runs) == (first.keep, True, 0)
    with pytest.raises(ValueError, match="another search"):
        amp.search(network(), batches(), LOSS, budget=120.0, file=file, **QUICK)
    with pytest.raises(ValueError, match=r"another search: .*the loss"):
        amp.search(net, batches(), lambda out, label: LOSS(out, label) * 2, budget=120.0, file=file,
                   **QUICK)
    (tmp_path / "search.json").write_text("{")
    with pytest.raises(ValueError, match="was not written by search"):
        amp.search(net, batches(), LOSS, budget=120.0, file=file, **QUICK)
    for wrong in (str(tmp_path), str(tmp_path / "missing" / "search.json")):
        with pytest.raises(ValueError, match="in a folder that exists"):
            amp.search(net, batches(), LOSS, budget=120.0, file=wrong, **QUICK)


def test_search_stopped_early_returns_best_so_far():
    spent = amp.search(network(root_mean_square), batches(), LOSS, budget=1e-9, **QUICK)
    assert not spent.verified
    assert "budget is spent" in spent.notes[0]
    calls = []

    def interrupted(output, label):
        calls.append(output)
        if len(calls) == 14:
            raise KeyboardInterrupt
        return LOSS(output, label)

    stopped = amp.search(network(root_mean_square), batches(), interrupted, budget=120.0, **QUICK)
    assert not stopped.verified
    assert "interrupted" in stopped.notes[0]
    assert stopped.best.snr >= 20


@pytest.mark.parametrize(("given", "error", "said"), [
    ({"budget": True}, TypeError, "seconds as a float, or training runs as an int"),
    ({"budget": -1.0}, ValueError, "budget"),
    ({"budget": 2}, ValueError, "at least 3 training runs"),
    ({"budget": 9.0, "optimizer_params": 0.1}, TypeError, "a dict of the optimizer's arguments"),
    ({"budget": 9.0, "batches": list}, ValueError, "at least one batch"),
    ({"budget": 9.0, "loss_fn": lambda out, label: LOSS(out, label) * np.inf}, ValueError,
     "not finite in float32 either"),
    ({"budget": 9.0, "batches": lambda: [*batches(1), (nd.full((8, 12), np.inf), nd.zeros(8))]},
     ValueError, "batch 1: the loss or a gradient is not finite in float32 either"),
    ({"budget": 9.0, "net": nn.Dense(2)}, TypeError, "gluon_amp.convert has converted"),
])
def test_unsupported_arguments_are_refused(given, error, said):
    given = {"net": network(), "batches": batches, "loss_fn": LOSS, **QUICK, **given}
    with pytest.raises(error, match=said):
        amp.search(**{**given, "batches": given["batches"]()})


def test_multiply_adds_of_products_are_counted():
    x = mx.sym.var("x")
    y = mx.sym.Convolution(x, kernel=(3, 3), num_filter=8, num_group=2, name="conv")
    y = mx.sym.Deconvolution(y, kernel=(2, 2), stride=(2, 2), num_filter=6, name="up")
    y = mx.sym.FullyConnected(y, num_hidden=10, name="dense")
    y = mx.sym.batch_dot(mx.sym.expand_dims(y, 1), mx.sym.expand_dims(y, 1), transpose_b=True,
                         name="product")
    shapes, _, _ = y.infer_shape(x=(2, 4, 8, 8))
    shapes = dict(zip(y.list_arguments(), shapes))
    assert multiply_adds(Graph.read(y), shapes) == {
        "conv": 2 * 8 * 6 * 6 * 2 * 9, "up": 2 * 8 * 6 * 6 * 6 * 4,
        "dense": 2 * 10 * 6 * 12 * 12, "product": 2 * 10}


def test_training_that_overflows_keeps_what_an_xray_of_its_weights_advises():
    """Weights grow until a square overflows. At the first weights, nothing does."""
    def grows(output, label):
        return -output.mean(axis=1)

    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(16, in_units=12),
                nn.HybridLambda(lambda F, x: F.square(x) * 1e-4, prefix="square_"),
                nn.Dense(4, in_units=16))
    net.initialize(mx.init.Constant(0.1))
    amp.convert(net, BARE)
    given = [(nd.abs(data), label) for data, label in batches()]
    assert amp.xray(net, given, grows).findings == []
    found = amp.search(net, given, grows, budget=600.0, steps=12, seeds=1, progress=False,
                       optimizer_params={"learning_rate": 3.0})
    assert (found.verified, found.runs) == (True, 4)
    assert found.best.nodes == {"net_square_square0"}
