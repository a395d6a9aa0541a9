"""loss_scale="auto": decided by the types in which gradients are computed."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from modules import prepared
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready, sequence

SCALES = {"float16": 4, "mixed_float16": 4, "pure_float16": 4, "bfloat16": 1, "mixed_bfloat16": 1,
          "float32": 1, "tf32": 1}
DYNAMIC = [policy for policy, scale in SCALES.items() if scale == 4]
CHECKED = [policy for policy in SCALES if "16" in policy]
DATA = np.random.RandomState(0).rand(8, 5).astype("float32")


def network(policy=None):
    mx.random.seed(0)
    net = ready(sequence(nn.Dense(6, activation="relu", in_units=5, prefix="net_a_"),
                         nn.Dense(3, in_units=6, prefix="net_b_"), prefix="net_"), mx.init.Xavier())
    if policy:
        amp.convert(net, policy)
    net.hybridize()
    return net


def inputs():
    return (mx.np.array(DATA) if mx.util.is_np_array() else nd.array(DATA)) * 1


def loss_of(net, factor=1.0):
    with autograd.record():
        return (net(inputs()).astype("float32") ** 2).mean() * factor


def trainer_of(net, **options):
    return amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9},
                       **options)


def symbol(policy=None):
    body = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="body")
    whole = mx.sym.SoftmaxOutput(body, name="softmax")
    return amp.convert_symbol(whole, policy) if policy else whole


def module_of(sym, **options):
    return prepared(amp.Module(sym, context=mx.cpu(), **options), (8, 5), (8,))


BATCH = mx.io.DataBatch([nd.array(DATA)], [nd.zeros(8)])


@pytest.mark.numpy
@pytest.mark.parametrize("policy", SCALES)
def test_policy_decides_scale_and_checks(policy):
    net = network(policy)
    trainer = trainer_of(net)
    assert trainer.loss_scale == SCALES[policy]
    trainer.backward(loss_of(net))
    gradient = net[1].weight.grad().astype("float32").asnumpy()
    assert trainer.step(1)
    assert (trainer.loss_scale > 4) == (policy in DYNAMIC)
    reference = network()
    loss_of(reference).backward()
    expected = reference[1].weight.grad().asnumpy() * SCALES[policy]
    assert np.allclose(gradient, expected, rtol=0.05, atol=0.02 * np.abs(expected).max())
    trainer.backward(loss_of(net, float("inf")))
    assert trainer.step(1) == (policy not in CHECKED)
    assert trainer.skipped == (policy in CHECKED)
    finite = np.isfinite(net[1].weight.data().astype("float32").asnumpy()).all()
    assert finite == (policy in CHECKED)


def test_cast_network_without_convert_is_scaled():
    net = network()
    net.cast("float16")
    assert trainer_of(net).loss_scale == 4


@pytest.mark.parametrize("policy", [None, "float32", "tf32"])
def test_float32_has_the_bits_of_mxnet(policy):
    weights = []
    for own in (True, False):
        net = network(policy if own else None)
        trainer = trainer_of(net) if own else gluon.Trainer(
            net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        for _ in range(3):
            loss_of(net).backward()
            trainer.step(2)
        weights.append([p.data().asnumpy() for p in net.collect_params().values()])
    assert all((a == b).all() for a, b in zip(*weights))


def test_clip_norm_in_float32_checks_and_does_not_scale():
    net = network()
    trainer = trainer_of(net, clip_norm=1e-3)
    trainer.backward(loss_of(net))
    assert trainer.step(1)
    assert trainer.loss_scale == 1
    trainer.backward(loss_of(net, float("inf")))
    assert not trainer.step(1)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_conversion_before_the_first_pass_counts(policy):
    net = network()
    trainer = trainer_of(net)
    assert trainer.loss_scale == 1
    amp.convert(net, policy)
    trainer.backward(loss_of(net))
    assert trainer.step(1)
    assert trainer.loss_scale > 4


@pytest.mark.parametrize("begin", ["backward", "loss.backward", "scale_loss", "load_states"])
def test_conversion_afterwards_is_refused(begin, tmp_path):
    net = network()
    trainer = trainer_of(net)
    if begin == "backward":
        trainer.backward(loss_of(net))
    elif begin == "loss.backward":
        loss_of(net).backward()
        trainer.step(1)
    elif begin == "scale_loss":
        with amp.scale_loss(loss_of(net), trainer) as scaled:
            scaled.backward()
    else:
        trainer.save_states(str(tmp_path / "states"))
        trainer.load_states(str(tmp_path / "states"))
    with pytest.raises(RuntimeError, match=r"float16.*convert before .*loss_scale='dynamic'"):
        amp.convert(net, "mixed_float16")
    assert type(net) is nn.HybridSequential
    trainer.backward(loss_of(net))
    trainer.step(1)
    trainer_of(net)  # takes the parameters
    assert amp.convert(net, "mixed_float16") is net


def test_conversion_to_a_type_that_needs_less_is_accepted():
    net = network("float16")
    trainer = trainer_of(net)
    trainer.backward(loss_of(net))
    amp.convert(net, "bfloat16")
    assert trainer.loss_scale == 4


@pytest.mark.parametrize(("name", "options"), [("lbsgd", {}), ("sgd", {"update_on_kvstore": True})])
def test_settings_that_scaling_excludes_are_valid_in_float32_only(name, options):
    net = network()
    trainer = amp.Trainer(net.collect_params(), name, **options)
    amp.convert(net, "mixed_float16")
    for call in (lambda: trainer.backward(loss_of(net)),
                 lambda: amp.Trainer(net.collect_params(), name, **options)):
        with pytest.raises(ValueError, match=r"lbsgd|update_on_kvstore"):
            call()


@pytest.mark.parametrize("policy", SCALES)
def test_scale_of_a_file_is_loaded_into_a_dynamic_one_only(policy, tmp_path):
    net = network("mixed_float16")
    trainer = trainer_of(net)
    for _ in range(3):
        trainer.backward(loss_of(net))
        trainer.step(1)
    saved = trainer.loss_scale
    trainer.save_states(str(tmp_path / "states"))
    resumed = trainer_of(network(policy))
    resumed.load_states(str(tmp_path / "states"))
    assert resumed.loss_scale == (saved if policy in DYNAMIC else 1)


@pytest.mark.parametrize("policy", SCALES)
def test_symbol_decides_scale_and_checks(policy):
    module = module_of(symbol(policy))
    assert module.loss_scale == SCALES[policy]
    module.forward_backward(BATCH)
    assert module.update()
    assert (module.loss_scale > 4) == (policy in DYNAMIC)
    module.forward_backward(mx.io.DataBatch([nd.array(DATA * np.float32("inf"))], [nd.zeros(8)]))
    assert module.update() == (policy not in CHECKED)


def test_module_of_a_symbol_with_casts_by_hand_is_scaled():
    low = mx.sym.Cast(mx.sym.var("data"), dtype="float16")
    body = mx.sym.FullyConnected(low, num_hidden=3, name="body")
    whole = mx.sym.SoftmaxOutput(mx.sym.Cast(body, dtype="float32"), name="softmax")
    assert module_of(whole).loss_scale == 4


def test_module_that_only_predicts_is_not_decided():
    module = prepared(amp.Module(symbol("float16"), context=mx.cpu()), (8, 5), (8,), optimizer=None,
                      for_training=False)
    module.forward(BATCH, is_train=False)
    assert module.get_outputs()[0].dtype == np.float32
    assert module.loss_scale == 1
    module.bind([("data", (8, 5))], [("softmax_label", (8,))], force_rebind=True)
    assert module.loss_scale == 4


def buckets(policies):
    def generate(key):
        return symbol(policies[key]), ["data"], ["softmax_label"]

    module = amp.BucketingModule(generate, default_bucket_key=8, context=mx.cpu())
    module.bind([("data", (8, 5))], [("softmax_label", (8,))])
    module.init_params()
    module.init_optimizer()
    return module


def pass_of(module, key):
    module.forward_backward(mx.io.DataBatch(
        [nd.array(DATA[:key])], [nd.zeros(key)], bucket_key=key,
        provide_data=[("data", (key, 5))], provide_label=[("softmax_label", (key,))]))


def test_first_bucket_decides_for_all():
    module = buckets({8: "float16", 4: "float16"})
    assert module.loss_scale == 4
    pass_of(module, 4)
    assert module.update()


def test_bucket_that_needs_another_scale_is_refused():
    module = buckets({8: "float32", 4: "mixed_float16"})
    with pytest.raises(RuntimeError, match=r"float16.*loss_scale='dynamic'"):
        pass_of(module, 4)
