"""`xray`, `explain` and `types`: what float16 does to every tensor, and what is said of it."""
import csv
import json

import gluon_amp as amp
import networks
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from gluon_amp.cpu.library import random_numbers_kept
from gluon_amp.formats import FORMATS
from gluon_amp.graph.build import build
from gluon_amp.graph.graph import Graph
from gluon_amp.tools.cli import main
from gluon_amp.xray.statistics import Counts, Key, read
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn

sym = mx.sym
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


# ---- what the engine counts -----------------------------------------------------------------


def watched(symbol, head=1.0, watch=True, **arrays):
    """Runs a graph forward and backward: its output, its gradients, what was counted."""
    types = {name: a.dtype.name for name, a in arrays.items()}
    made = build(Graph.read(symbol), types, watch=watch).symbol()
    names = made.list_inputs()
    op = mx.nd.CachedOp(made, [("data_indices", list(range(len(names)))), ("param_indices", [])])
    values = {name: nd.array(a, dtype=a.dtype) for name, a in arrays.items()}
    for value in values.values():
        value.attach_grad()
    read()
    with autograd.record():
        output = op(*(values[name] for name in names))
    output.backward(nd.ones_like(output) * head)
    return output.asnumpy(), {n: v.grad.asnumpy() for n, v in values.items()}, read()


def assert_counted(counts, exact):
    """Counts are those that numpy finds in the exact float32 numbers."""
    exact = np.asarray(exact, np.float32).ravel()
    finite = exact[np.isfinite(exact) & (exact != 0)]
    bins = np.bincount(np.maximum(np.frexp(finite)[1] - 1 + 127, 0), minlength=256)
    np.testing.assert_array_equal(counts.bins, bins)
    with np.errstate(over="ignore"):
        half = exact.astype(np.float16).astype(np.float32)
    fits = np.isfinite(half)
    assert counts.zero == (exact == 0).sum()
    assert counts.infinite == np.isinf(exact).sum()
    assert counts.nan == np.isnan(exact).sum()
    assert counts.overflowed == (np.isfinite(exact) & ~fits).sum()
    assert counts.flushed == ((exact != 0) & (half == 0)).sum()
    wide = exact.astype(np.float64)
    assert counts.squares == pytest.approx((wide[np.isfinite(exact)] ** 2).sum(), rel=1e-6)
    assert counts.error_squares == pytest.approx(((wide - half)[fits] ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("size", [1, 3, 511, 513, 70000, 200001])
def test_exponents_are_counted_before_the_rounding_forward_and_backward(size, rng):
    x = (rng.standard_normal(size) * 2.0 ** rng.integers(-24, 13, size)).astype(np.float16)
    x[:3] = [0, 65504, 30000][:size]
    factor = np.float32(np.float16(3.3))
    _, _, counts = watched(sym.var("x") * 3.3, x=x)
    name = next(iter(counts)).node
    assert_counted(counts[Key(name, False, 0)], x.astype(np.float32) * factor)
    assert_counted(counts[Key(name, True, 0)], np.full(size, factor))
    assert counts[Key(name, True, 0)].numbers == size


def test_infinities_and_nans_are_counted_apart():
    x = np.float16([np.inf, -np.inf, np.nan, 0, 1, 65504])
    _, _, counts = watched(sym.var("x") * 2, x=x)
    found = next(c for key, c in counts.items() if not key.backward)
    assert (found.infinite, found.nan, found.zero, found.overflowed) == (2, 1, 1, 1)


@pytest.mark.parametrize("channels", [5, 16, 24])
def test_a_convolution_counts_its_numbers_and_no_padding(channels, rng):
    x = rng.standard_normal((3, 16, 9, 9)).astype(np.float16)
    w = rng.standard_normal((channels, 16, 3, 3)).astype(np.float16)
    conv = sym.Convolution(sym.var("x"), sym.var("w"), num_filter=channels, kernel=(3, 3),
                           no_bias=True, name="conv")
    output, gradients, counts = watched(conv, x=x, w=w)
    forward = counts[Key("conv", False, 0)]
    assert forward.numbers == output.size
    assert forward.zero == 0
    assert forward.squares == pytest.approx((output.astype(np.float64) ** 2).sum(), rel=1e-3)
    for which, name in enumerate("xw"):
        found = counts[Key("conv", True, which)]
        right = gradients[name].astype(np.float64)
        assert found.numbers == right.size
        assert found.squares == pytest.approx((right ** 2).sum(), rel=1e-3)


@pytest.mark.parametrize("name", ["dense", "lstm", "attention", "images"])
def test_watched_networks_have_the_same_bits(name):
    def step(watch):
        mx.random.seed(1)
        np.random.seed(1)
        net, inputs = _network(name)
        data = [a.astype("float32") for a in inputs(np.random.default_rng(7))]
        net(*data)
        clean = Graph.read(net._cached_graph[1])
        graph, types = net.mixed_graph(["float32"] * len(data))
        made = build(graph, types, watch=watch).symbol()
        values = {p.name: p.data() for p in net.collect_params().values()}
        values.update(zip([d.name for d in net._cached_graph[0]], data))
        names = made.list_inputs()
        op = mx.nd.CachedOp(made, [("data_indices", list(range(len(names)))),
                                   ("param_indices", [])])
        mx.random.seed(3)
        with autograd.record():
            output = op(*(values[n] for n in names))
            loss = sum((o ** 2).mean() for o in (output if isinstance(output, list) else [output]))
        loss.backward()
        assert clean.variables()
        return [values[p.name].grad.asnumpy() for p in net.collect_params().values()
                if p.grad_req != "null"]

    for watched_one, plain in zip(step(True), step(False)):
        assert watched_one.tobytes() == plain.tobytes()
    assert read()


def _network(name):
    make, inputs = {
        "dense": (lambda: nn.Dense(3), networks.floats(4, 5)),
        "lstm": (lambda: in_a_block(rnn.LSTM(8, input_size=6)), networks.floats(5, 2, 6)),
        "attention": (lambda: networks.SelfAttention(), networks.floats(5, 2, 32)),
        "images": (lambda: images_net(), networks.images(9)),
    }[name]
    net = make()
    net.initialize(mx.init.Xavier())
    amp.convert(net)
    return net, inputs


def in_a_block(block):
    net = nn.HybridSequential()
    net.add(block)
    return net


def images_net(fault=None):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"),
                nn.MaxPool2D(), nn.Conv2D(12, 3), nn.LeakyReLU(0.1))
        if fault:
            net.add(nn.HybridLambda(fault, prefix="fault_"))
        net.add(nn.GlobalAvgPool2D(), nn.Dropout(0.2), nn.Dense(4))
    return net


def test_counts_tell_of_any_format():
    counts = Counts.of_array(np.float32([0, 2.0 ** -40, 2.0 ** -20, 1, 2.0 ** 17]))
    assert counts.shares(FORMATS["float16"]) == {
        "zero": 0.2, "flushed": 0.2, "subnormal": 0.2, "overflowed": 0.2}
    assert counts.shares(FORMATS["bfloat16"]) == {
        "zero": 0.2, "flushed": 0, "subnormal": 0, "overflowed": 0}
    assert counts.shares(FORMATS["float8_e4m3"])["flushed"] == 0.4
    assert counts.shares(FORMATS["float16"], scale=2.0 ** -2)["overflowed"] == 0
    assert counts.headroom(FORMATS["float16"]) == (-26, -2)
    assert counts.range == (-40, 17)


# ---- what is advised ------------------------------------------------------------------------


def batches(count=2, size=12):
    rng = np.random.default_rng(0)
    return [(nd.array(rng.standard_normal((8, 3, size, size))), nd.array(rng.integers(0, 4, 8)))
            for _ in range(count)]


def converted(fault=None):
    net = images_net(fault)
    net.initialize(mx.init.Xavier())
    return amp.convert(net)


FAULTS = {
    "an activation of 1e5": (lambda F, x: x * 1e5, "range above"),
    "up by 2^17 and down": (lambda F, x: (x * 2.0 ** 14 * 8) * 2.0 ** -17, "range above"),
    "an exponent": (lambda F, x: F.exp(x * 5), "range above"),
    "nearly nothing": (lambda F, x: x * 1e-7, "range below"),
    "a difference that cancels": (lambda F, x: (x + 3e3) - 3e3, "cancellation"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_first_and_what_is_kept_mends_it(fault):
    function, reason = FAULTS[fault]
    net = converted(function)
    view = amp.xray(net, batches(), LOSS)
    assert view.findings[0].node.startswith("net_fault_"), view
    assert view.findings[0].reason.startswith(reason)
    assert not any("still" in note for note in view.notes)
    amp.convert(net, keep=view.keep)
    after = amp.xray(net, batches(), LOSS)
    assert after.findings == []
    assert np.isfinite(after.losses).all()
    np.testing.assert_allclose(after.losses, after.reference_losses, rtol=0.01)


def test_a_healthy_network_gets_no_advice_and_a_window_of_loss_scales():
    view = amp.xray(converted(), batches(), LOSS)
    assert (view.findings, view.keep, view.first_overflow) == ([], [], None)
    low, high = view.loss_scale
    assert low < 64 < high
    assert view.window.high_tensor.startswith("gradient of ")
    np.testing.assert_allclose(view.losses, view.reference_losses, rtol=0.01)


def test_above_the_windows_high_end_a_gradient_overflows_and_at_it_none_does():
    net = converted()
    view = amp.xray(net, batches(1), LOSS)
    assert amp.explain(net, batches(1)[0], LOSS, view.loss_scale[1] / 2) is None
    found = amp.explain(net, batches(1)[0], LOSS, view.loss_scale[1] * 8)
    assert found.backward
    assert "is the first that is not finite at the loss scale" in str(found)


class Squares(gluon.HybridBlock):
    """Its outermost block has operators of its own."""

    def __init__(self):
        super().__init__(prefix="squares_")
        with self.name_scope():
            self.one, self.two = nn.Dense(8), nn.Dense(4)

    def hybrid_forward(self, F, x):
        y = self.one(x) * 3000
        return self.two(y * y * 1e-4)


def test_a_node_of_the_outermost_block_is_kept_by_its_own_name():
    rng = np.random.default_rng(0)
    given = [(nd.array(rng.standard_normal((8, 5))), nd.array(rng.integers(0, 4, 8)))]
    net = Squares()
    net.initialize(mx.init.Xavier())
    amp.convert(net)
    view = amp.xray(net, given, LOSS)
    assert view.first_overflow is not None
    assert all(name.startswith("squares_") for name in view.keep)
    amp.convert(net, keep=view.keep)
    after = amp.xray(net, given, LOSS)
    assert (after.findings, after.first_overflow) == ([], None)


def test_explain_names_the_first_node_whose_output_is_not_finite():
    net = converted(lambda F, x: (x * 2.0 ** 14 * 8) * 2.0 ** -17)
    found = amp.explain(net, batches(1)[0], LOSS)
    assert found.node == "net_fault__mulscalar0"
    assert not found.backward
    assert "basic_layers.py, line " in found.where


def test_nothing_of_the_users_changes():
    net = converted()
    data, _ = batches(1)[0]
    net(data)

    def all_bits():
        return [p.data().asnumpy().tobytes() for p in net.collect_params().values()]

    before = all_bits()
    amp.xray(net, batches(), LOSS)
    amp.explain(net, batches(1)[0], LOSS)
    assert all_bits() == before


def training(looked_at, make=None, give=None, steps=4):
    """A network with Dropout that was trained with an X-ray or without: all that it holds, and what
    MXNet draws next."""
    mx.random.seed(5)
    np.random.seed(5)
    net = (make or converted)()
    given = (give or batches)(steps)
    net(given[0][0])
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
    if looked_at:
        view = amp.xray(net, given, LOSS, trainer, steps=steps)
        assert all(any(k.backward and c.squares for k, c in step.items()) for _, step in view.steps)
        scales, losses = [scale for scale, _ in view.steps], view.losses
    else:
        scales, losses = [], []
        for data, label in given:
            with autograd.record():
                loss = LOSS(net(data), label)
            trainer.backward(loss)
            scales.append(trainer.loss_scale)
            trainer.step(len(label))
            losses.append(float(loss.mean().asscalar()))
    weights = [p.data().asnumpy().tobytes() for p in net.collect_params().values()]
    return scales, losses, trainer.skipped, weights, nd.random.uniform(shape=4).asnumpy().tobytes()


def test_training_under_an_xray_has_the_same_bits_and_random_numbers():
    assert training(True) == training(False)


def test_an_xray_draws_no_random_numbers_of_the_users():
    net = converted()
    net(batches(1)[0][0])
    mx.random.seed(6)
    expected = nd.random.normal(shape=4).asnumpy()
    mx.random.seed(6)
    amp.xray(net, batches(), LOSS)
    amp.explain(net, batches(1)[0], LOSS)
    np.testing.assert_array_equal(nd.random.normal(shape=4).asnumpy(), expected)


def test_random_numbers_are_put_back_where_an_operator_has_failed():
    mx.random.seed(6)
    expected = nd.random.normal(shape=4).asnumpy()
    mx.random.seed(6)

    def draws_and_fails():
        with random_numbers_kept():
            nd.random.normal(shape=4).wait_to_read()
            nd.linalg.potrf(nd.array([[-1.0]]))  # fails later, where somebody waits
    with pytest.raises(mx.MXNetError, match="potrf"):
        draws_and_fails()
    np.testing.assert_array_equal(nd.random.normal(shape=4).asnumpy(), expected)


class WithOwnParameter(gluon.Block):
    """A plain Block that multiplies by a parameter of its own."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.scale = self.params.get("scale", shape=(1,))
            self.body = images_net()


class Mean(gluon.Block):
    """A plain Block between two hybrid ones, one of which it calls twice."""

    def __init__(self, fault=None):
        super().__init__(prefix="mean_")
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Dense(8, in_units=6, activation="relu"))
            if fault:
                self.body.add(nn.HybridLambda(fault, prefix="fault_"))
            self.out = nn.Dense(4, in_units=8)

    def forward(self, x):
        return self.out((self.body(x) + self.body(x * 2)) / 2)


def rows(count=2):
    rng = np.random.default_rng(0)
    return [(nd.array(rng.standard_normal((8, 6))), nd.array(rng.integers(0, 4, 8)))
            for _ in range(count)]


def prepared(net, keep=()):
    mx.random.seed(1)
    net.initialize(mx.init.Normal(0.3))
    return amp.convert(net, keep=keep)


def symbol_block():
    data = sym.var("data")
    hidden = sym.FullyConnected(data, num_hidden=8, name="hidden")
    out = sym.FullyConnected(hidden * hidden * 1e5, num_hidden=4, name="out")
    return gluon.SymbolBlock(out, data)


OTHER_NETWORKS = {
    "a plain Block": (lambda: Mean(lambda F, x: x * 3e4 * 3e2 * 1e-5), "fault"),
    "a SymbolBlock": (symbol_block, "mulscalar"),
}


@pytest.mark.parametrize("name", OTHER_NETWORKS)
def test_other_networks_than_hybrid_blocks_are_looked_into(name):
    make, part = OTHER_NETWORKS[name]
    net = prepared(make())
    view = amp.xray(net, rows(), LOSS)
    assert part in view.findings[0].node
    assert view.keep
    amp.convert(net, keep=view.keep)
    after = amp.xray(net, rows(), LOSS)
    assert after.findings == []
    np.testing.assert_allclose(after.losses, after.reference_losses, rtol=0.01)


def test_an_rnn_layer_by_itself_is_looked_into():
    net = prepared(rnn.LSTM(4, input_size=6, prefix="lstm_"))
    given = [(nd.ones((5, 2, 6)), nd.ones((5, 2)))]
    view = amp.xray(net, given, LOSS)
    assert view.findings == []
    assert any(t.op == "RNN" for t in view.tensors)
    np.testing.assert_allclose(view.losses, view.reference_losses, rtol=0.01)


def test_a_block_that_is_called_twice_is_counted_twice():
    view = amp.xray(prepared(Mean()), rows(1), LOSS)
    numbers = {t.key: t.counts.numbers for t in view.tensors}
    assert numbers[Key("mean_dense1_fwd", False, 0)] == 8 * 4
    assert numbers[Key("mean_dense0_fwd", False, 0)] == 2 * 8 * 8
    assert numbers[Key("mean_dense0_fwd", True, 1)] == 2 * 8 * 6


class TwoParts(gluon.Block):
    """As most of Gluon's networks: parts without a prefix, which so have one name."""

    def __init__(self):
        super().__init__(prefix="parts_")
        with self.name_scope():
            self.features = nn.HybridSequential(prefix="")
            self.output = nn.HybridSequential(prefix="")
            self.features.add(nn.Dense(6, in_units=6, activation="relu"))
            self.output.add(nn.Dense(6, in_units=6))

    def forward(self, x):
        return self.output(self.features(x))


def test_parts_of_one_name_are_looked_into_each():
    net = prepared(TwoParts())
    view = amp.xray(net, rows(1), LOSS)
    assert {"parts_dense0_fwd", "parts_dense1_fwd"} <= {t.key.node for t in view.tensors}
    data, label = rows(1)[0]
    assert view.losses == [float(LOSS(net(data), label).mean().asscalar())]


def test_training_of_a_plain_block_under_an_xray_has_the_same_bits():
    def make():
        return prepared(Mean())
    assert training(True, make, rows) == training(False, make, rows)


def test_with_a_trainer_training_goes_on_and_updates_are_counted():
    net = converted()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
    view = amp.xray(net, batches(3), LOSS, trainer, steps=3)
    assert len(view.losses) == 3
    weights = {w.name: w for w in view.weights}
    assert weights["net_conv0_weight"].updates.numbers == 3 * 16 * 27
    assert weights["net_dense0_weight"].without_master > 0.5  # such steps vanish in float16
    assert weights["net_batchnorm0_gamma"].counts.numbers == 16


def test_gradients_that_add_up_are_each_steps_own():
    losses = []
    for request in ("write", "add"):
        net = prepared(Mean())
        for parameter in net.collect_params().values():
            parameter.grad_req = request
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        losses.append(amp.xray(net, rows(3), LOSS, trainer, reference=False).losses)
    assert losses[0] == losses[1]


def test_a_loss_that_is_not_finite_in_float32_either_is_said_first():
    view = amp.xray(converted(), batches(1), lambda out, label: LOSS(out, label) * np.inf)
    assert "not finite in float32 either" in view.notes[0]


@pytest.mark.parametrize(("make", "given", "said"), [
    (converted, [], "at least one batch"),
    (converted, [()], "a batch is a tuple of arrays"),
    (converted, [(nd.array([]), nd.ones(2))], "arrays that are not empty"),
    (converted, [(nd.ones((2, 3, 12)), nd.ones(2))], r"does not take this batch.*\(2, 3, 12\)"),
    (images_net, batches(1), "gluon_amp.convert has converted"),
    (lambda: prepared(images_net(), keep=nn.HybridSequential), batches(1),
     "no tensors of less than float32"),
    (lambda: amp.convert(nn.Sequential()), batches(1), "gluon_amp.convert has converted"),
    (lambda: amp.convert(WithOwnParameter()), batches(1), "parameters of its own.*scale"),
])
def test_what_cannot_be_looked_into_is_refused(make, given, said):
    with pytest.raises((ValueError, TypeError), match=said):
        amp.xray(make(), given, LOSS)


# ---- files ----------------------------------------------------------------------------------


def test_the_files_hold_a_page_a_table_and_a_line_for_each_tensor_and_step(tmp_path):
    view = amp.xray(converted(lambda F, x: x * 1e5), batches(2), LOSS)
    page = view.save(str(tmp_path / "out"))
    with open(page, encoding="utf-8") as file:
        text = file.read()
    assert "http" not in text
    assert view.keep_line.replace("'", "&#x27;") in text
    with open(tmp_path / "out" / "summary.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["tensor"] for row in rows} == {t.name for t in view.tensors}
    lines = [json.loads(line) for line in (tmp_path / "out" / "xray.jsonl").read_text().split("\n")
             if line]
    assert lines[0]["keep"] == view.keep
    assert {line["step"] for line in lines[1:]} == {0, 1}
    with pytest.raises(FileExistsError, match="new folder"):
        view.save(str(tmp_path / "out"))


def test_the_command_tells_what_another_format_would_have_done(tmp_path, capsys):
    folder = str(tmp_path / "run")
    amp.xray(converted(lambda F, x: x * 1e-7), batches(2), LOSS).save(folder)
    assert main(["xray", folder]) == 0
    assert "range below" in capsys.readouterr().out
    for format_, found in (("bfloat16", False), ("float8_e4m3", True)):
        assert main(["xray", folder, "--format", format_]) == 0
        said = capsys.readouterr().out
        assert ("range below" in said) == found
        page = tmp_path / "run" / f"xray-{format_}.html"
        assert str(page) in said
        assert format_ in page.read_text()
    assert main(["xray", folder, "--format", "float9"]) == 1
    assert "Valid: float32, float16, bfloat16" in capsys.readouterr().err
    assert main(["xray", str(tmp_path)]) == 1
    assert "holds xray.jsonl" in capsys.readouterr().err
    (tmp_path / "run" / "xray.jsonl").write_text("no")
    assert main(["xray", folder]) == 1
    assert "no file that xray has written" in capsys.readouterr().err


def test_the_command_says_where_no_loss_scale_fits(tmp_path, capsys):
    view = amp.xray(converted(), batches(1), LOSS)
    view.window = view.window._replace(low=2 * view.window.high)
    view.save(str(tmp_path / "run"))
    assert main(["xray", str(tmp_path / "run")]) == 0
    assert "No loss scale fits all gradients: from" in capsys.readouterr().out


def test_what_a_format_makes_of_counts_is_what_it_makes_of_the_numbers():
    rng = np.random.default_rng(1)
    numbers = (rng.uniform(1, 2, 20000) * 2.0 ** rng.integers(-30, 14, 20000)).astype(np.float32)
    counts = Counts.of_array(numbers)
    for name in ("float16", "bfloat16", "float8_e5m2"):
        made = counts.as_in(FORMATS[name])
        rounded = FORMATS[name].round(numbers).astype(np.float64)
        right = np.square(rounded - numbers).sum() / np.square(numbers.astype(np.float64)).sum()
        assert made.error_squares / made.squares == pytest.approx(right, rel=0.15)
        assert made.flushed == pytest.approx((rounded == 0).sum(), abs=600)


# ---- types ----------------------------------------------------------------------------------


def test_types_tell_what_each_operator_runs_in_and_why():
    net = converted(lambda F, x: x * 1e5)
    with pytest.raises(RuntimeError, match="run net on data once"):
        amp.types(net)
    net(batches(1)[0][0])
    rows = {row.node: row for row in amp.types(net)}
    assert rows["net_conv0_fwd"].output == "float16"
    assert rows["net_conv0_fwd"].rule == "product: the work of matrix units"
    assert rows["net_conv0_fwd"].casts == 1
    assert rows["net_batchnorm0_fwd"].inputs[:2] == ("float16", "float32")
    assert "constant 100000" in rows["net_fault__mulscalar0"].rule
    assert rows["net_fault__mulscalar0"].output == "float32"
    amp.convert(net, keep="net_conv0")
    net(batches(1)[0][0])
    assert {row.node: row for row in amp.types(net)}["net_conv0_fwd"].rule == "kept by keep="


def test_the_doctor_tells_a_networks_types(capsys):
    assert main(["doctor", "--model", "squeezenet1.1", "--types"]) == 0
    out = capsys.readouterr().out
    assert "Convolution" in out
    assert "nodes give less than float32" in out
    assert main(["doctor", "--types"]) == 1
    assert "--model" in capsys.readouterr().err
