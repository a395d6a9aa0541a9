"""The lines in the tables of docs/coming_from.md run."""
import gluon_amp as amp
import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

pytestmark = pytest.mark.long


def test_insightfaces_symbol_trains_and_is_saved_in_float32(tmp_path):
    embedding = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="fc1")
    label = mx.sym.var("softmax_label")
    centres = mx.sym.L2Normalization(mx.sym.var("fc7_weight", shape=(10, 16)), mode="instance")
    features = mx.sym.L2Normalization(embedding, mode="instance") * 64
    fc7 = mx.sym.FullyConnected(features, centres, no_bias=True, num_hidden=10, name="fc7")
    cosine = mx.sym.pick(fc7, label, axis=1)
    with_margin = mx.sym.cos(mx.sym.arccos(cosine / 64) + 0.5) * 64
    change = mx.sym.expand_dims(with_margin - cosine, 1)
    fc7 = fc7 + mx.sym.broadcast_mul(mx.sym.one_hot(label, depth=10), change)
    sym = mx.sym.SoftmaxOutput(fc7, label, name="softmax")

    faces = mx.io.NDArrayIter(mx.nd.random.normal(shape=(64, 32)), mx.nd.arange(64) % 10, 16)
    module = amp.Module(amp.convert_symbol(sym))
    module.fit(faces, num_epoch=2, initializer=mx.init.Xavier(),
               optimizer="sgd", optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    args, aux = module.get_params()
    mx.model.save_checkpoint(str(tmp_path / "arcface"), 2, embedding, {
        name: array.astype("float32") for name, array in args.items() if "fc1" in name}, aux)
    _, saved, _ = mx.model.load_checkpoint(str(tmp_path / "arcface"), 2)
    assert set(saved) == {"fc1_weight", "fc1_bias"}


def test_bert_scripts_accumulate_and_clip():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Embedding(50, 8), gluon.nn.LayerNorm(in_channels=8),
            gluon.nn.Dense(2, in_units=40))
    net.initialize(mx.init.Xavier())
    amp.convert(net)
    net.collect_params().setattr("grad_req", "add")
    trainer = amp.Trainer(
        net.collect_params(), "adamw", {"learning_rate": 1e-3}, clip_norm=1.0,
        loss_scale=amp.DynamicLossScale(growth_interval=2000))
    loss_fn, accumulate = gluon.loss.SoftmaxCrossEntropyLoss(), 2
    for _ in range(accumulate):
        tokens, label = mx.nd.random.randint(0, 50, (4, 5)), mx.nd.array([0, 1, 1, 0])
        with autograd.record():
            loss = loss_fn(net(tokens), label).mean() / accumulate
        trainer.backward(loss)
    assert trainer.step(1)
    net.collect_params().zero_grad()


def test_each_line_of_the_tables_runs(tmp_path):
    class Network(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.body = nn.Dense(16, activation="relu", in_units=4)
                self.output = nn.Dense(3, in_units=16)

        def hybrid_forward(self, F, x):
            return self.output(self.body(x))

    net = Network()
    net.initialize(mx.init.Xavier())
    for policy in ("O0", "O1", "O2", "O3", "mixed_float16", "float32"):
        amp.convert(net, policy)
    amp.convert(net, keep=[net.output])
    amp.restore(net)
    amp.convert(net)

    batch_size = 8
    batches = [(mx.nd.random.normal(shape=(batch_size, 4)), mx.nd.arange(batch_size) % 3)] * 4
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    for scale in (1024, amp.DynamicLossScale(growth_interval=2000),
                  amp.DynamicLossScale(minimum=1.0, maximum=2.0 ** 24)):
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1},
                              loss_scale=scale, clip_norm=1.0)
        for data, label in batches:
            with autograd.record():
                loss = loss_fn(net(data), label)
            trainer.backward(loss)
            assert trainer.step(batch_size)

    with autograd.record():
        loss = loss_fn(net(data), label)
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    assert set(trainer.unscale()) == set(net.collect_params())
    assert trainer.clip_norm(1.0, batch_size) > 0
    assert trainer.update(batch_size)
    found = amp.lr_find(net, trainer, loss_fn, batches, steps=20)
    trainer.save_states(str(tmp_path / "net.states"))

    fc = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    assert amp.convert_symbol(fc, keep=["fc"]).list_arguments() == fc.list_arguments()
    args = {"fc_weight": mx.nd.ones((3, 4)), "fc_bias": mx.nd.zeros(3)}
    _, args, _ = amp.convert_model(fc, args, {})
    assert args["fc_weight"].dtype.__name__ == "float16"
    assert found.suggestion is not None
