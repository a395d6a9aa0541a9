"""`xray`, `explain` and `types`: the effect of float16 on every tensor, and the advice given."""
import json
import re
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu.library import random_numbers_kept
from gluon_amp.formats import FORMATS
from gluon_amp.inspection.tensors import Counts
from gluon_amp.tools.cli import main
from gluon_amp.tools.types import types
from mxnet import nd
from mxnet.gluon import nn
from networks import ready, sequence
from processes import printed
from xray_networks import (
    LOSS,
    Mean,
    WithOwnParameter,
    batches,
    calling,
    check_mended,
    converted,
    images_net,
    layers,
    named,
    prepared,
    rows,
    training,
)

pytestmark = [pytest.mark.numpy, pytest.mark.long]

def named_net(*layers):
    return sequence(*layers, prefix="net_")


# ---- advice ---------------------------------------------------------------------------------


FAULTS = {
    "an activation of 1e5": (lambda F, x: x * 1e5, "range above"),
    "up by 2^17 and down": (lambda F, x: (x * 2.0 ** 14 * 8) * 2.0 ** -17, "range above"),
    "an exponent": (lambda F, x: F.exp(x * 5), "range above"),
    "nearly nothing": (lambda F, x: x * 1e-7, "range below"),
    "a difference that cancels": (lambda F, x: (x + 3e3) - 3e3, "cancellation"),
    "an exponent of a large sum": (lambda F, x: F.exp((x + 300) - 300), "small errors move"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_first_finding_and_keep_fixes_it(fault):
    function, reason = FAULTS[fault]
    mx.random.seed(1)  # with other weights, an exponent needs float32 everywhere
    net = converted(function)
    view = amp.xray(net, batches(), LOSS)
    assert view.findings[0].node.startswith("net_fault_"), view
    assert view.findings[0].reason.startswith(reason)
    assert not any("still" in note for note in view.notes)
    check_mended(net, view, batches())


@pytest.mark.parametrize(("policy", "begin"), [
    ("float16", "amp.convert(net, keep=["), ("O1", "amp.convert(net, 'mixed_float16', keep=["),
    (amp.Policy("mine", compute="float16"), "amp.convert(net, policy, keep=[")],
    ids=["float16", "mixed_float16", "mine"])
def test_keep_line_has_policy(policy, begin):
    net = ready(images_net(lambda F, x: x * 1e5), mx.init.Xavier())
    assert amp.xray(amp.convert(net, policy), batches(1), LOSS).keep_line.startswith(begin)


def test_keep_covers_all_batches():
    net = named_net(nn.Dense(8, use_bias=False),
                    nn.HybridLambda(lambda F, x: x * 3e4 * 30 * 1e-6, prefix="net_always_"),
                    nn.Dense(8, use_bias=False),
                    nn.HybridLambda(lambda F, x: F.sqrt(x * x + 1), prefix="net_sometimes_"),
                    nn.Dense(4))
    mx.random.seed(1)
    net.initialize(mx.init.Xavier())
    amp.convert(net)
    small, large = rows()
    given = [small, (large[0] * 1000, large[1])]
    view = amp.xray(net, given, LOSS)
    assert {"net_always", "net_sometimes"} <= set(view.keep)
    check_mended(net, view, given)


def test_healthy_network_has_no_findings_and_a_loss_scale_window():
    view = amp.xray(converted(), batches(), LOSS)
    assert (view.findings, view.keep, view.first_overflow) == ([], [], None)
    low, high = view.loss_scale
    assert low < 64 < high
    assert view.window.high_tensor.startswith("gradient of ")
    np.testing.assert_allclose(view.losses, view.reference_losses, rtol=0.01)


def test_gradient_overflows_only_above_high_end_of_window():
    net = converted()
    view = amp.xray(net, batches(1), LOSS)
    assert amp.explain(net, batches(1)[0], LOSS, view.loss_scale[1] / 2).first_overflow is None
    found = amp.explain(net, batches(1)[0], LOSS, view.loss_scale[1] * 8).first_overflow
    assert found.backward
    assert "is the first that is not finite at the loss scale" in str(found)


def test_keep_names_nodes_of_outermost_block():
    def forward(F, x, one, two):
        y = one(x) * 3000
        return two(y * y * 1e-4)

    net = calling(forward, *layers(8, 4))
    view = amp.xray(net, rows(), LOSS)
    assert view.first_overflow is not None
    assert all(name.startswith("net_") for name in view.keep)
    check_mended(net, view, rows())


def test_explain_names_first_node_with_nonfinite_output():
    net = converted(lambda F, x: (x * 2.0 ** 14 * 8) * 2.0 ** -17)
    found = amp.explain(net, batches(1)[0], LOSS).first_overflow
    assert found.node == named("net_fault__mulscalar0")
    assert not found.backward
    assert "block net_fault, " in found.where
    assert "test_xray.py, line " in found.where  # of the lambda above
    net = converted(lambda F, x: x * 2)
    found = amp.explain(net, batches(1)[0], LOSS, 2.0 ** 60).first_overflow
    assert "basic_layers.py, line " in found.where  # a layer that MXNet calls for the user


def test_parameters_and_random_state_are_unchanged():
    net = converted()
    net(batches(1)[0][0])

    def all_bits():
        return [p.data().asnumpy().tobytes() for p in net.collect_params().values()]

    before = all_bits()
    mx.random.seed(6)
    expected = nd.random.normal(shape=4).asnumpy()
    mx.random.seed(6)
    amp.xray(net, batches(), LOSS)
    amp.explain(net, batches(1)[0], LOSS)
    np.testing.assert_array_equal(nd.random.normal(shape=4).asnumpy(), expected)
    assert all_bits() == before


def test_training_under_xray_is_bitwise_identical():
    assert training(True) == training(False)


def test_random_state_is_restored_after_operator_error():
    def draws_and_fails():
        with random_numbers_kept():
            nd.random.normal(shape=4).wait_to_read()
            nd.linalg.potrf(nd.array([[-1.0]]))  # fails later, at the wait

    mx.random.seed(6)
    expected = nd.random.normal(shape=4).asnumpy()
    mx.random.seed(6)
    with pytest.raises(mx.MXNetError, match="potrf"):
        draws_and_fails()
    np.testing.assert_array_equal(nd.random.normal(shape=4).asnumpy(), expected)


COPIES = """
import gluon_amp, mxnet as mx
from gluon_amp.cpu.library import random_numbers_kept
from mxnet import nd

def draw(count):
    return [nd.random.uniform(shape=3).asnumpy().tolist() for _ in range(count)]

for before in range(4):
    for within in range(5):
        mx.random.seed(3)
        draw(before)
        expected = draw(7)
        mx.random.seed(3)
        draw(before)
        with random_numbers_kept() as put_back:
            first = draw(within)
            put_back()
            assert draw(within) == first, (before, within)
        assert draw(7) == expected, (before, within)
"""


@pytest.mark.parametrize("copies", ["1", "3"])
def test_random_state_includes_all_parallel_generators(copies):
    printed(COPIES, MXNET_CPU_PARALLEL_RAND_COPY=copies)


def test_gradients_with_grad_req_add_are_reset_each_step():
    losses = []
    for request in ("write", "add"):
        net = prepared(Mean())
        net.collect_params().setattr("grad_req", request)
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        losses.append(amp.xray(net, rows(3), LOSS, trainer, reference=False).losses)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("make", "given", "said"), [
    (converted, lambda: [], "at least one batch"),
    (converted, lambda: [()], "a batch is a tuple of arrays"),
    (converted, lambda: [(nd.array([]), nd.ones(2))], "arrays that are not empty"),
    (converted, lambda: [(nd.ones((2, 3, 12)), nd.ones(2))],
     r"does not take this batch.*\(2, 3, 12\)"),
    (converted, lambda: [(*batches(1)[0][:1], nd.ones((2, 3)))],
     r"loss_fn does not take.*\(2, 3\)"),
    (lambda: calling(lambda F, x, dense: (dense(x), dense(x) * 2), nn.Dense(4)), lambda: rows(1),
     r"does not take.*\n?.*For several outputs, pass .* lambda outputs, label: "),
    (converted, lambda: [(batches(1)[0][0], np.ones(2))], r"Received: .*'ndarray'"),
    (converted, lambda: batches(1)[0], r"is a list of tuples \(data, label\)"),
    (images_net, batches, "HybridSequential, which is float32: convert it to a 16-bit policy"),
    (lambda: prepared(images_net(), keep=nn.HybridSequential), batches,
     "no tensors below float32"),
    (lambda: amp.convert(nn.Sequential()), batches, "with a HybridBlock in it.*: Sequential$"),
    (lambda: amp.convert(WithOwnParameter()), batches, "parameters of its own.*scale"),
])
def test_unsupported_arguments_are_refused(make, given, said):
    with pytest.raises((ValueError, TypeError), match=said):
        amp.xray(make(), given(), LOSS)


# ---- files ----------------------------------------------------------------------------------


def test_save_writes_page_table_and_one_line_per_tensor_and_step(tmp_path):
    view = amp.xray(converted(lambda F, x: x * 1e5), batches(2), LOSS)
    page = view.save(str(tmp_path / "out"))
    with open(page, encoding="utf-8") as file:
        text = file.read()
    assert "http" not in text
    assert re.search(r'<p class="verdict error">.*\n.*\n<div class=code><pre>', text)
    node = view.findings[0].node
    assert f'<span class=tag>Error</span> <b><a href="#{node}">{node}</a>:</b>' in text
    assert view.keep_line.replace("'", "&#x27;") in text
    assert [w.name for w in view.after.weights] == [w.name for w in view.weights] != []
    assert sorted(view.after.numbers) == view.numbers == [0, 1]
    lines = [json.loads(line) for line in (tmp_path / "out" / "xray.jsonl").read_text().split("\n")
             if line]
    assert lines[0]["keep"] == view.keep
    assert {line["step"] for line in lines[1:] if line["kind"] != "weight"} == {0, 1}
    with pytest.raises(FileExistsError, match="new folder"):
        view.save(str(tmp_path / "out"))


def test_save_leaves_other_folders(tmp_path):
    (tmp_path / "out.writing").mkdir()
    (tmp_path / "out.writing" / "mine").write_text("")
    amp.xray(converted(), batches(1), LOSS).save(tmp_path / "out")
    assert (tmp_path / "out.writing" / "mine").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"out", "out.writing"}


@pytest.mark.parametrize("name", ["<!--<script>", "</script>", "<!--"])
def test_page_is_whole_with_any_name_of_a_node(tmp_path, name):
    net = named_net(nn.Dense(4, in_units=6, prefix=f"{name}dense_"))
    page = amp.xray(prepared(net), rows(1), LOSS).save(tmp_path / "out")
    text = Path(page).read_text(encoding="utf-8")
    assert (text.count("<script"), text.count("</script"), text.count("<!--")) == (1, 1, 0)
    data = json.loads(re.search(r"const data = (.*);\n", text).group(1))
    assert any(name in row["tensor"] for row in data["states"][0]["rows"])


def test_command_analyzes_saved_run_in_another_format(tmp_path, capsys):
    folder = str(tmp_path / "run")
    amp.xray(converted(lambda F, x: x * 1e-7), batches(2), LOSS).save(folder)
    assert main(["xray", folder]) == 0
    assert "range below" in capsys.readouterr().out
    for format_, found in (("bfloat16", False), ("float16", True)):
        assert main(["xray", folder, "--format", format_]) == 0
        said = capsys.readouterr().out
        assert ("range below" in said) == found
        page = tmp_path / "run" / f"xray-{format_}.html"
        assert str(page) in said
        assert format_ in page.read_text()
        assert "gradient of net_batchnorm0_gamma" in page.read_text()
    assert main(["xray", folder, "--format", "float9"]) == 1
    assert "float32, float16, bfloat16. Received: 'float9'" in capsys.readouterr().err
    assert main(["xray", str(tmp_path)]) == 1
    assert f"holds xray.jsonl, as {folder} does" in capsys.readouterr().err
    (tmp_path / "run" / "xray.jsonl").write_text("no")
    assert main(["xray", folder]) == 1
    assert "was not written by xray" in capsys.readouterr().err


def test_command_reports_if_no_loss_scale_fits(tmp_path, capsys):
    view = amp.xray(converted(), batches(1), LOSS)
    view.window = view.window._replace(low=2 * view.window.high)
    view.save(str(tmp_path / "run"))
    assert main(["xray", str(tmp_path / "run")]) == 0
    assert "No loss scale fits all gradients: from" in capsys.readouterr().out


def test_bfloat16_needs_no_loss_scale():
    net = ready(images_net(None), mx.init.Xavier())
    view = amp.xray(amp.convert(net, "mixed_bfloat16"), batches(1), LOSS)
    assert str(view.window) == "No loss scale is needed: all gradients fit as they are"
    assert "Loss scales that fit: from" in str(amp.xray(converted(), batches(1), LOSS).window)


def test_statistics_from_counts_match_rounded_numbers():
    rng = np.random.default_rng(1)
    numbers = (rng.uniform(1, 2, 20000) * 2.0 ** rng.integers(-30, 14, 20000)).astype(np.float32)
    counts = Counts.of_array(numbers)
    for name in ("float16", "bfloat16"):
        made = counts.as_in(FORMATS[name])
        rounded = FORMATS[name].round(numbers).astype(np.float64)
        right = np.square(rounded - numbers).sum() / np.square(numbers.astype(np.float64)).sum()
        assert made.error_squares / made.squares == pytest.approx(right, rel=0.15)
        assert made.flushed == pytest.approx((rounded == 0).sum(), abs=600)


# ---- types ----------------------------------------------------------------------------------


def test_types_reports_type_and_rule_of_each_operator():
    net = converted(lambda F, x: x * 1e5)
    with pytest.raises(RuntimeError, match="run net on data once"):
        types(net)
    net(batches(1)[0][0])
    rows = {row.node: row for row in types(net)}
    assert rows["net_conv0_fwd"].output == "float16"
    assert rows["net_conv0_fwd"].rule == "product: the work of matrix units"
    assert rows["net_conv0_fwd"].casts == 1
    assert rows["net_batchnorm0_fwd"].inputs[:2] == ("float16", "float32")
    large = rows[named("net_fault__mulscalar0")]
    assert "constant 100000" in large.rule
    assert large.output == "float32"
    amp.convert(net, keep="net_conv0")
    net(batches(1)[0][0])
    assert {row.node: row for row in types(net)}["net_conv0_fwd"].rule == "kept by keep="


def test_types_of_a_plain_block_are_those_of_the_blocks_in_it():
    net, layers = nn.Sequential(), nn.HybridSequential()
    layers.add(nn.Dense(3, in_units=4), nn.LayerNorm(in_channels=3))
    net.add(nn.Dense(4, in_units=4), layers)
    net.initialize()
    with pytest.raises(TypeError, match=r"a converted network or a symbol\. Received: Sequential"):
        types(net)
    amp.convert(net)
    with pytest.raises(RuntimeError, match="on data once first"):
        types(net)
    net(mx.nd.ones((2, 4)))
    assert [row.operator for row in types(net)] == ["FullyConnected"] * 2 + ["LayerNorm"]
    assert types(net)[1:] == types(layers)


@pytest.mark.mx_nd("a command runs outside numpy mode")
def test_command_prints_types_of_network(tmp_path, capsys):
    assert main(["types", "squeezenet1.1"]) == 0
    out = capsys.readouterr().out
    assert "Convolution" in out
    assert "nodes below float32; " in out
    net = ready(named_net(nn.Dense(3, in_units=4, prefix="net_dense0_"), nn.Dense(2, in_units=3)))
    amp.convert(net, "bfloat16", keep="net_dense0")
    net(mx.nd.ones((2, 4)))
    net.export(str(tmp_path / "net"))

    def outputs(*flags):
        assert main(["types", str(tmp_path / "net-symbol.json"), "--json", *flags]) == 0
        return [row["output"] for row in json.loads(capsys.readouterr().out)]

    assert outputs() == ["float32", "bfloat16"]  # as it was converted
    assert outputs("--policy", "float16") == ["float16", "float16"]
    assert main(["types", "no-such-network"]) == 1
    assert "model zoo" in capsys.readouterr().err


@pytest.mark.parametrize(("use_bias", "policy", "said"), [
    (False, "pure_float16", "1 of 1 node below float32; 1 input cast."),
    (True, "mixed_float16", "1 of 1 node below float32; 3 inputs cast.")])
def test_types_counts_inputs_and_nodes_in_grammatical_numbers(use_bias, policy, said):
    net = amp.convert(ready(nn.Dense(3, in_units=4, use_bias=use_bias)), policy)
    net(mx.nd.ones((2, 4)))
    assert str(types(net)).endswith(said)


def test_verdict_is_first_and_gradients_have_parameter_names():
    net = named_net(nn.Dense(8, prefix="net_dense0_"),
                    nn.HybridLambda(lambda F, x: x * x * 40000), nn.Dense(4, prefix="net_dense1_"))
    net.initialize(mx.init.Xavier())
    amp.convert(net)
    data, label = nd.random.normal(shape=(16, 20)), nd.arange(16) % 4
    view = amp.xray(net, [(data, label)], LOSS)
    assert re.search(r": \d+ operators? needs? float32 beyond those that the policy keeps",
                    str(view).splitlines()[0])
    assert {t.name for t in view.tensors if t.kind == "weight gradient"} == {
        f"gradient of net_dense{i}_{name}" for i in (0, 1) for name in ("weight", "bias")}
    view = amp.xray(net, [(data * np.inf, label)], LOSS)
    assert view.verdict == "No verdict: no batch is finite in float32"
