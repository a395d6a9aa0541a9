"""convert_symbol and convert_model: placement of casts, names, and refused arguments."""
import json

import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from cases import cases
from mxnet import gluon
from mxnet import symbol as S

HALF_POLICIES = ["float16", "mixed_float16", "pure_float16"]
POLICIES = ["float32", *HALF_POLICIES]
OUTPUTS = ["SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput",
           "MAERegressionOutput", "SVMOutput", "softmax", "log_softmax"]
HEADS = {**{name: lambda x, name=name: getattr(S, name)(x, name="head") for name in OUTPUTS},
         "MakeLoss": lambda x: S.MakeLoss(S.abs(x), name="head")}


def body(classes=3):
    x = S.Convolution(S.var("data"), kernel=(3, 3), num_filter=4, name="conv")
    x = S.BatchNorm(x, fix_gamma=False, name="bn")
    x = S.Activation(x, act_type="relu", name="relu")
    return S.FullyConnected(x, num_hidden=classes, name="fc")


def heads():
    x = body()
    return S.Group([S.SoftmaxOutput(x, name="softmax"), S.BlockGrad(x, name="logits"),
                    S.LinearRegressionOutput(S.FullyConnected(x, num_hidden=1, name="fc2"),
                                             name="linear"), x])


def fused():
    cell = mx.rnn.FusedRNNCell(6, num_layers=2, mode="lstm", prefix="lstm_")
    outputs, _ = cell.unroll(4, S.swapaxes(S.var("data"), dim1=0, dim2=1), layout="TNC",
                             merge_outputs=True)
    outputs = S.swapaxes(outputs, dim1=0, dim2=1)
    return S.SoftmaxOutput(S.FullyConnected(outputs, num_hidden=3, name="fc"), name="softmax")


def unrolled():
    words = S.Embedding(S.var("data"), input_dim=3000, output_dim=6, name="embed")
    outputs, _ = mx.rnn.LSTMCell(5).unroll(4, words, layout="NTC", merge_outputs=True)
    return S.SoftmaxOutput(S.FullyConnected(outputs, num_hidden=3, name="fc"), name="softmax")


def dot():
    projection = S.var("projection", shape=(6, 5), init=mx.init.Xavier())
    x = S.LayerNorm(S.dot(S.var("data"), projection), name="norm")
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=3, name="fc"), name="softmax")


def loop():
    weight, bias = (S.var(f"cell_{n}", shape=s, stype="default") for n, s in
                    (("weight", (6, 6)), ("bias", (6,))))

    def step(x, state):
        state = S.tanh(S.FullyConnected(x, weight, bias, num_hidden=6) + state * 0.5)
        return state, state

    outputs, _ = S.contrib.foreach(step, S.transpose(S.var("data"), axes=(1, 0, 2)),
                                   S.mean(S.var("data"), axis=1))
    outputs = S.transpose(outputs, axes=(1, 0, 2))
    return S.SoftmaxOutput(S.FullyConnected(outputs, num_hidden=3, name="fc"), name="softmax")


def by_hand():
    """A network with casts as in MXNet's float16 examples."""
    x = S.FullyConnected(S.Cast(S.var("data"), dtype="float16", name="in16"), num_hidden=4,
                         name="fc1")
    x = S.FullyConnected(S.Activation(x, act_type="relu", name="relu"), num_hidden=3, name="fc2")
    return S.SoftmaxOutput(S.Cast(x, dtype="float32", name="out32"), name="softmax")


NETWORKS = {  # with the shape of their data
    "conv": (lambda: HEADS["SoftmaxOutput"](body()), (4, 3, 8, 8)), "heads": (heads, (4, 3, 8, 8)),
    "fused": (fused, (4, 4, 6)), "unrolled": (unrolled, (4, 4)), "dot": (dot, (4, 6)),
    "loop": (loop, (4, 4, 6)), "by_hand": (by_hand, (4, 6)),
}


def nodes(sym):
    return [(n["op"], n["name"]) for n in json.loads(sym.tojson())["nodes"] if n["op"] != "null"]


def types(sym):
    """The type of every tensor by name, float32 if MXNet does not infer it."""
    inner = sym.get_internals()
    return {name: np.dtype(t or "float32").name for name, t in
            zip(inner.list_outputs(), inner.infer_type_partial(data="float32")[1])}


def names(sym):
    return sym.list_arguments(), sym.list_outputs(), sym.list_auxiliary_states()


def inputs(sym, shape, rng):
    shapes = dict(zip(sym.list_arguments(), sym.infer_shape(data=shape)[0]))
    labels = [n for n in shapes if n.endswith("_label")]
    data = rng.integers(0, 3000, shape) if len(shape) == 2 and "embed_weight" in shapes \
        else rng.standard_normal(shape)
    batch = mx.io.DataBatch([mx.nd.array(data)],
                            [mx.nd.array(rng.integers(0, 3, shapes[n])) for n in labels])
    return batch, [("data", shape)], [(n, shapes[n]) for n in labels]


def trained(sym, shape, rng, values=None, module=amp.Module):
    """Outputs of a step, and the change of parameters."""
    batch, data, label = inputs(sym, shape, rng)
    made = module(sym, label_names=[name for name, _ in label])
    made.bind(data, label or None)
    made.init_params(mx.init.Xavier())
    if values:
        made.set_params(*values)
    before = {k: v.astype("float32") for k, v in made.get_params()[0].items()}
    made.init_optimizer(optimizer_params={"learning_rate": 1.0})
    made.forward(batch, is_train=True)
    outputs = [o.asnumpy() for o in made.get_outputs()]
    made.backward([mx.nd.ones(o.shape) for o in outputs] if not label else None)
    made.update()
    after = made.get_params()[0]
    return outputs, {k: (after[k].astype("float32") - v).asnumpy() for k, v in before.items()}, \
        (before, made.get_params()[1])


def check_near(mine, theirs, rel):
    assert np.abs(mine - theirs).max() <= rel * np.abs(theirs).max() + 1e-6


# ---- placement of casts

def test_casts_follow_data_and_precede_loss():
    sym = amp.convert_symbol(HEADS["SoftmaxOutput"](body()))
    assert nodes(sym) == [
        ("Cast", "data_cast_float16"), ("Convolution", "conv"), ("BatchNorm", "bn"),
        ("Activation", "relu"), ("FullyConnected", "fc"), ("Cast", "fc_cast_float32"),
        ("SoftmaxOutput", "head")]
    half = {"data_cast_float16_output", "conv_weight", "conv_bias", "conv_output", "bn_output",
            "relu_output", "fc_weight", "fc_bias", "fc_output"}
    assert {name for name, dtype in types(sym).items() if dtype == "float16"} == half
    assert nodes(amp.convert_symbol(by_hand())) == nodes(by_hand())  # whose casts are not repeated


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_every_head_computes_in_float32(head, policy):
    sym = amp.convert_symbol(HEADS[head](body()), policy)
    found = types(sym)
    assert found["fc_output"] == "float16"
    assert found["head_output"] == "float32"
    assert nodes(sym)[-2][0] == "Cast"


@pytest.mark.parametrize(("policy", "dtype"), {
    "float32": "float32", "mixed_float16": "float32", "float16": "float16",
    "pure_float16": "float16"}.items())
def test_each_policy_stores_parameters_in_its_type(policy, dtype):
    found = types(amp.convert_symbol(HEADS["SoftmaxOutput"](body()), policy))
    assert found["conv_weight"] == found["fc_bias"] == dtype
    assert found["bn_gamma"] == found["bn_moving_var"] == "float32"
    assert found["head_output"] == ("float16" if policy == "pure_float16" else "float32")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NETWORKS)
def test_names_are_kept_and_conversion_is_idempotent(name, policy):
    sym = NETWORKS[name][0]()
    before = sym.tojson()
    once = amp.convert_symbol(sym, policy)
    assert names(once) == names(sym)
    assert sym.tojson() == before
    assert amp.convert_symbol(once, policy).tojson() == once.tojson()


@pytest.mark.parametrize("policy", HALF_POLICIES)
@pytest.mark.parametrize("name", NETWORKS)
def test_saved_symbol_loads_with_all_casts(name, policy, tmp_path):
    sym = amp.convert_symbol(NETWORKS[name][0](), policy)
    sym.save(str(tmp_path / "net.json"))
    loaded = S.load(str(tmp_path / "net.json"))
    assert types(loaded) == types(sym)
    assert loaded.tojson() == sym.tojson()
    assert "_gluon_amp" not in sym.tojson()


@pytest.mark.parametrize("policy", POLICIES)
def test_mxnet_module_binds_the_symbol(policy):
    module = mx.mod.Module(amp.convert_symbol(HEADS["SoftmaxOutput"](body()), policy),
                           label_names=["head_label"])
    module.bind([("data", (4, 3, 8, 8))], [("head_label", (4,))])
    assert module._exec_group.execs[0].arg_dict["fc_weight"].dtype is \
        (np.float16 if policy in ("float16", "pure_float16") else np.float32)


# ---- keep

@pytest.mark.parametrize("keep", ["fc", ["fc"], ["f.*"], ("conv|fc",)])
def test_kept_layers_stay_float32(keep):
    found = types(amp.convert_symbol(HEADS["SoftmaxOutput"](body()), keep=keep))
    assert {found[n] for n in ("fc_weight", "fc_bias", "fc_output")} == {"float32"}
    assert found["conv_output"] == ("float32" if keep == ("conv|fc",) else "float16")


@pytest.mark.parametrize(("symbol", "arguments", "error", "message"), [
    (body(), {"keep": ["cnv"]}, ValueError, "matches nothing.*conv"),
    (body(), {"keep": ["con"]}, ValueError, "matches nothing"),  # whole names only
    (body(), {"keep": ["("]}, ValueError, "not a regular expression"),
    (body(), {"keep": [3]}, TypeError, "3"),
    (body(), {"keep": 3}, TypeError, "keep takes.*Received: int"),
    (body(), {"keep": None}, TypeError, "keep takes.*Received: NoneType"),
    (body(), {"policy": "float8"}, ValueError, "float8"),
    (gluon.nn.Dense(3), {}, TypeError, r"Use gluon_amp\.convert"),
    (mx.nd.ones(3), {}, TypeError, "Received: NDArray")])
def test_bad_arguments_are_refused(symbol, arguments, error, message):
    with pytest.raises(error, match=message):
        amp.convert_symbol(symbol, **arguments)


# ---- checkpoints

def checkpoint(rng):
    sym = HEADS["SoftmaxOutput"](body())
    shapes, _, aux = sym.infer_shape(data=(4, 3, 8, 8))
    args = {n: mx.nd.array(rng.standard_normal(s)) for n, s in zip(sym.list_arguments(), shapes)
            if n not in ("data", "head_label")}
    return sym, args, dict(zip(sym.list_auxiliary_states(), map(mx.nd.ones, aux)))


def test_checkpoint_is_rounded_once_and_not_modified(rng):
    sym, args, aux = checkpoint(rng)
    before = {name: a.asnumpy() for name, a in args.items()}
    converted, new, new_aux = amp.convert_model(sym, args, aux)
    for name, value in before.items():
        half = not name.startswith("bn")
        assert new[name].dtype is (np.float16 if half else np.float32)
        assert np.array_equal(new[name].asnumpy(), value.astype(new[name].dtype))
        assert args[name].dtype is np.float32
        assert np.array_equal(args[name].asnumpy(), value)
    assert {a.dtype for a in new_aux.values()} == {np.float32}
    assert types(converted) == types(amp.convert_symbol(sym))


def test_missing_and_misnamed_parameters_are_listed(rng):
    sym, args, aux = checkpoint(rng)
    args["fc_wieght"], _ = args.pop("fc_weight"), aux.pop("bn_moving_var")
    message = r"missing bn_moving_var, missing fc_weight \(misnamed fc_wieght\?\), " \
              "unknown fc_wieght"
    with pytest.raises(ValueError, match=message):
        amp.convert_model(sym, args, aux)


def test_checkpoint_beyond_float16_is_refused(rng, tmp_path):
    sym, args, aux = checkpoint(rng)
    args["fc_weight"][0] = 1e5
    with pytest.raises(ValueError, match=r"keep=.*Received: fc_weight \(up to 100000\)"):
        amp.convert_model(sym, args, aux)
    amp.convert_model(sym, args, aux, keep="fc")
    mod = amp.Module(amp.convert_symbol(sym), label_names=["head_label"])
    mod.bind([("data", (4, 3, 8, 8))], [("head_label", (4,))])
    with pytest.raises(ValueError, match="Received: fc_weight"):
        mod.init_params(arg_params=args, aux_params=aux)
    mx.model.save_checkpoint(str(tmp_path / "net"), 1, mod.symbol, args, aux)
    with pytest.raises(ValueError, match="Received: fc_weight"):
        amp.Module.load(str(tmp_path / "net"), 1)


# ---- execution

@pytest.mark.parametrize("policy", HALF_POLICIES)
@pytest.mark.parametrize("name", sorted(set(NETWORKS) - {"loop"}))  # MXNet cannot bind it either
def test_outputs_and_updates_match_float32_within_rounding(name, policy, rng):
    make, shape = NETWORKS[name]
    state = rng.bit_generator.state
    if name == "heads":
        make = lambda: S.Group(list(heads())[:3])  # noqa: E731
    outputs, moved, values = trained(make(), shape, rng)
    rng.bit_generator.state = state
    halves, half_moved, _ = trained(amp.convert_symbol(make(), policy), shape, rng, values)
    for mine, theirs in zip(halves, outputs):
        check_near(mine, theirs, 0.01)
    largest = max(np.abs(m).max() for m in moved.values())
    for n, wanted in moved.items():
        assert np.abs(half_moved[n] - wanted).max() <= 0.01 * largest, n


@pytest.mark.parametrize("name", cases(["resnet18_v2", "mobilenetv2_0.25", "squeezenet1.1"],
                                       ["resnet18_v1", "vgg11_bn"]))
def test_model_zoo_networks_convert_as_symbols(name, rng):
    make, sample = networks.ZOO[name]
    net, shape = make(), sample(rng)[0].shape
    sym = net(S.var("data"))
    converted = amp.convert_symbol(sym)
    assert names(converted) == names(sym)
    # (Gluon's symbols declare parameters as float32)
    assert "float16" in types(converted).values()
    x = mx.nd.array(rng.standard_normal(shape))
    net.initialize(mx.init.Xavier())
    wanted = net(x).asnumpy()
    params = net.collect_params()
    args = {n: params[n].data() for n in sym.list_arguments() if n != "data"}
    aux = {n: params[n].data() for n in sym.list_auxiliary_states()}
    converted, args, aux = amp.convert_model(sym, args, aux)
    module = amp.Module(converted, label_names=None)
    module.bind([("data", shape)], for_training=False)
    module.set_params(args, aux)
    module.forward(mx.io.DataBatch([x]))
    check_near(module.get_outputs()[0].asnumpy(), wanted, 0.02)


def test_checkpoint_of_small_numbers_is_named(caplog):
    factor = mx.sym.var("layer_weight", shape=(3, 5))
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), factor, num_hidden=3, no_bias=True,
                                   name="layer")
    for size, is_named in ((1, False), (2e-8, True)):
        amp.convert_model(symbol, {"layer_weight": mx.nd.ones((3, 5)) * size}, {})
        assert ("layer_weight" in caplog.text) == is_named


def with_layouts():
    with mx.AttrScope(__layout__="TNC", __note__="mine"):
        states = S.swapaxes(S.FullyConnected(S.var("data"), num_hidden=4, flatten=False, name="fc"),
                            dim1=0, dim2=1, name="states")
        parts = S.split(states, num_outputs=2, axis=2, name="parts")
    return S.Group([states, parts[0], parts[1], S.var("data")])


@pytest.mark.parametrize("policy", [*POLICIES, "bfloat16", "mixed_bfloat16"])
def test_outputs_keep_their_attributes_and_arguments_their_names(policy):
    symbol = with_layouts()
    converted = amp.convert_symbol(symbol, policy)
    assert converted.list_arguments() == symbol.list_arguments()
    for i in range(4):
        for key in ("__layout__", "__note__"):
            assert converted[i].attr(key) == symbol[i].attr(key)


@pytest.mark.mx_nd("MXNet's Module has no numpy mode")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("policy", ["float32", "float16", "bfloat16"])
def test_module_joins_outputs_and_splits_their_gradients_on_the_axis_of_batches(policy, devices):
    symbol = amp.convert_symbol(with_layouts()[0], policy)
    module = amp.Module(symbol, label_names=None, context=[mx.cpu(i) for i in range(devices)])
    module.bind([mx.io.DataDesc("data", (2, 3, 5), layout="NTC")])
    module.init_params(mx.init.One())
    data = np.arange(30, dtype="float32").reshape(2, 3, 5)
    module.forward(mx.io.DataBatch([mx.nd.array(data)]), is_train=True)
    out, = module.get_outputs()
    expected = np.repeat(data.sum(2).T[:, :, None], 4, axis=2)
    np.testing.assert_allclose(out.asnumpy(), expected, rtol=0.01)
    module.backward([mx.nd.ones((3, 2, 4))])
