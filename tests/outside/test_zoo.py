"""Small networks of each family in GluonCV, GluonNLP, GluonTS and MXNet's examples, in their loops
with the three lines of gluon_amp. `make -C tests zoo` installs these packages; tests of missing
packages are skipped."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from model_zoo import import_gluoncv
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from traces import at_most_traces

pytestmark = [pytest.mark.long,
              pytest.mark.filterwarnings("ignore:::gluoncv")]
WITH_OLD_PACKAGES = pytest.mark.filterwarnings("default")  # in Python 3.8: make -C tests zoo
WORDS = 40


@pytest.fixture(autouse=True)
def few_traces():
    with at_most_traces(4):  # of a block, with and without a state
        yield


def loop(net, losses_of, steps=12, scale="dynamic", optimizer="sgd", rate=1e-3):
    """Trains with losses that a function computes from the network; returns their sums."""
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), optimizer, {"learning_rate": rate},
                          loss_scale=scale)
    values = []
    for _ in range(steps):
        with autograd.record():
            total = sum(loss.mean() for loss in losses_of(net))
        trainer.backward(total)
        if trainer.step(1):
            values.append(total.asscalar())
    assert len(values) >= 3
    assert np.isfinite(values).all()
    assert values[-1] < values[0]
    return values


def train(net, loss_fn, inputs, label):
    """Trains on one batch."""
    net.initialize(mx.init.Xavier(), force_reinit=False)
    assert len(loop(net, lambda net: [loss_fn(net(*inputs), label)], optimizer="adam",
                    rate=3e-3)) >= 8


def words(*shape):
    return nd.array(np.random.randint(4, WORDS, shape))


SOFTMAX = gluon.loss.SoftmaxCrossEntropyLoss()

# GluonCV


@pytest.fixture()
def cv():
    try:
        return import_gluoncv().model_zoo
    except ImportError as error:
        pytest.skip(str(error))


def detection(size):
    """Two images with a box in each: corners, and its class."""
    boxes = nd.array([[[0.2, 0.3, 0.6, 0.8]], [[0.1, 0.1, 0.9, 0.5]]]) * size
    return nd.random.normal(shape=(2, 3, size, size)), boxes, nd.array([[[1]], [[0]]])


def ssd_of_mobilenet(cv):
    return cv.get_model("ssd_512_mobilenet1.0_custom", classes=["a", "b"], pretrained_base=False)


def ssd_of_vgg(cv):
    """Features that scale their inputs by a constant and slice their stages."""
    from gluoncv.model_zoo.ssd.ssd import SSD
    from gluoncv.model_zoo.ssd.vgg_atrous import VGGAtrousExtractor

    def features(**kwargs):
        return VGGAtrousExtractor([1] * 5, [8] * 5, [((8, 1, 1, 0), (8, 3, 2, 1))])

    return SSD(None, 128, features, None, sizes=(20, 50, 90, 110), ratios=[(1, 2, 0.5)] * 3,
               steps=(8, 16, 32), classes=["a", "b"])


@pytest.mark.parametrize("make", [ssd_of_mobilenet, ssd_of_vgg])
def test_ssd_detects(make, cv):
    from gluoncv.data.transforms.presets.ssd import SSDDefaultTrainTransform
    from gluoncv.loss import SSDMultiBoxLoss
    net = make(cv)
    net.initialize()
    images, boxes, ids = detection(128)
    with autograd.train_mode():
        _, _, anchors = net(images)
    generator = SSDDefaultTrainTransform(128, 128, anchors)._target_generator
    class_targets, box_targets, _ = generator(anchors, None, boxes, ids)

    def losses(net):
        classes, found, _ = net(images)
        total, _, _ = SSDMultiBoxLoss()(classes, found, class_targets, box_targets)
        return total

    loop(net, losses)
    assert net(images)[0].shape[0] == 2  # prediction has other outputs


def test_yolo_detects(cv):
    from gluoncv.data.transforms.presets.yolo import YOLO3DefaultTrainTransform
    net = cv.get_model("yolo3_mobilenet0.25_custom", classes=["a", "b"], pretrained_base=False)
    net.initialize(mx.init.Xavier(magnitude=2.24))
    transform = YOLO3DefaultTrainTransform(96, 96, net)
    images, boxes, ids = detection(96)
    targets = transform._target_generator(
        transform._fake_x, transform._feat_maps, transform._anchors, transform._offsets,
        boxes, ids)
    loop(net, lambda net: net(images, boxes, *targets), scale=8)


def test_faster_rcnn_detects(cv, monkeypatch):
    monkeypatch.setattr(np, "float", float, raising=False)  # GluonCV 0.10.5 uses it
    from gluoncv.model_zoo.rcnn.faster_rcnn import FasterRCNN
    from gluoncv.model_zoo.rcnn.rpn.rpn_target import RPNTargetGenerator
    features, top = nn.HybridSequential(), nn.HybridSequential()
    for width in (8, 8, 16, 16):
        features.add(nn.Conv2D(width, 3, 2, 1), nn.BatchNorm(), nn.Activation("relu"))
    top.add(nn.Conv2D(16, 3, 1, 1, activation="relu"))
    net = FasterRCNN(features, top, ["a", "b"], short=96, max_size=96, roi_size=(3, 3), strides=16,
                     rpn_channel=16, base_size=16, scales=(1, 2, 4), alloc_size=(16, 16),
                     rpn_train_pre_nms=60, rpn_train_post_nms=30, rpn_test_pre_nms=60,
                     rpn_test_post_nms=20, rpn_min_size=4, num_sample=16, max_num_gt=4)
    net.initialize(mx.init.Xavier())
    images, boxes, ids = detection(96)
    images, boxes, ids = images[:1], boxes[:1], ids[:1]
    with autograd.train_mode():
        anchors = net(images, boxes, ids)[7]
    # labels of anchors, targets of boxes, and their masks
    objects, places, counts = (nd.array(a).expand_dims(0) for a in RPNTargetGenerator(
        num_sample=32)(boxes[0], anchors[0], 96, 96))
    binary = gluon.loss.SigmoidBinaryCrossEntropyLoss(from_sigmoid=False)
    huber, classes = gluon.loss.HuberLoss(rho=1 / 9), gluon.loss.SoftmaxCrossEntropyLoss()

    def losses(net):
        found, moved, _, _, _, scores, proposed, _, class_targets, box_targets, masks, _ \
            = net(images, boxes, ids)
        return [binary(scores, objects.expand_dims(-1), objects.expand_dims(-1) >= 0),
                huber(proposed, places, counts), classes(found, class_targets, class_targets >= 0),
                huber(moved, box_targets, masks)]

    loop(net, losses, steps=16)
    assert net(images)[2].shape[-1] == 4


# small versions of MXNet's examples


class WordModel(gluon.Block):
    """The decoder shares the weights of the embedding."""

    def __init__(self, width=16):
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(WORDS, width)
            self.lstm = gluon.rnn.LSTM(width, 2, dropout=0.1, input_size=width)
            self.decode = nn.Dense(WORDS, flatten=False, in_units=width, params=self.embed.params)

    def forward(self, words, state):
        out, state = self.lstm(self.embed(words), state)
        return self.decode(out), state


def test_word_model_carries_state_and_clips_gradients():
    net = WordModel()
    net.initialize(mx.init.Xavier())
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 2}, clip_norm=0.25)
    state, text, losses = net.lstm.begin_state(4), words(25, 4), []
    for i in range(24):
        state = [s.detach() for s in state]
        start = 8 * (i % 3)
        with autograd.record():
            out, state = net(text[start:start + 8], state)
            loss = SOFTMAX(out, text[start + 1:start + 9]).mean()
        trainer.backward(loss)
        assert trainer.step(1)
        losses.append(loss.asscalar())
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def losses_of_a_critic(policy):
    mx.random.seed(1)
    generator, critic = nn.HybridSequential(), nn.HybridSequential()
    generator.add(nn.Conv2DTranspose(8, 4), nn.BatchNorm(), nn.Activation("relu"),
                  nn.Conv2DTranspose(2, 4, 2, 1), nn.Activation("tanh"))
    critic.add(nn.Conv2D(8, 4, 2, 1), nn.BatchNorm(), nn.LeakyReLU(0.2), nn.Conv2D(1, 4))
    trainers = []
    for net in (generator, critic):
        net.initialize(mx.init.Normal(0.05))
        amp.convert(net, policy)
        trainers.append(amp.Trainer(net.collect_params(), "adam",
                                    {"learning_rate": 1e-3, "beta1": 0.5}))
    binary, losses = gluon.loss.SigmoidBinaryCrossEntropyLoss(), []
    true = nd.tanh(nd.random.normal(shape=(8, 2, 8, 8)) + 1)
    for _ in range(8):
        noise = nd.random.normal(shape=(8, 6, 1, 1))
        with autograd.record():
            fake = generator(noise)
            loss = binary(critic(true).reshape((8, 1)), nd.ones((8, 1))) \
                + binary(critic(fake.detach()).reshape((8, 1)), nd.zeros((8, 1)))
        trainers[1].backward(loss)
        assert trainers[1].step(8)
        with autograd.record():
            cheat = binary(critic(generator(noise)).reshape((8, 1)), nd.ones((8, 1)))
        trainers[0].backward(cheat)
        assert trainers[0].step(8)
        losses.append([loss.mean().asscalar(), cheat.mean().asscalar()])
    return np.array(losses)


def test_generator_and_critic_train_as_in_float32():
    np.testing.assert_allclose(losses_of_a_critic("float16"), losses_of_a_critic("float32"),
                               atol=0.03)


class Tagger(gluon.Block):
    """A conditional random field: an LSTM gives scores of tags, a matrix scores of pairs."""

    def __init__(self, tags=5, width=8):
        super().__init__()
        self.tags = tags
        with self.name_scope():
            self.embed = nn.Embedding(WORDS, width)
            self.lstm = gluon.rnn.LSTM(width, bidirectional=True, input_size=width)
            self.score = nn.Dense(tags, flatten=False, in_units=2 * width)
            self.follows = self.params.get("follows", shape=(tags, tags))

    def forward(self, words):
        return self.score(self.lstm(self.embed(words)))

    def loss(self, words, tags):
        """Minus the logarithm of the probability of these tags."""
        scores, follows = self(words), self.follows.data()
        every = scores[0]  # batch, tags: the log of the sum over all paths
        taken = nd.pick(scores[0], tags[0])
        for i in range(1, len(words)):
            ways = every.expand_dims(2) + follows.expand_dims(0)
            most = ways.max(axis=1, keepdims=True)
            every = (ways - most).exp().sum(axis=1).log() + most.reshape((0, -1)) + scores[i]
            taken = taken + nd.pick(scores[i], tags[i]) \
                + nd.take(follows.reshape(-1), tags[i - 1] * self.tags + tags[i])
        return every.exp().sum(axis=1).log() - taken


def test_tagger_with_conditional_random_field_learns():
    net, text = Tagger(), words(6, 4)
    net.initialize(mx.init.Xavier())
    losses = loop(net, lambda net: [net.loss(text, text % 5)], optimizer="adam", rate=0.02)
    assert len(losses) == 12
    assert losses[-1] < losses[0] * 0.6


# GluonNLP


@pytest.fixture()
def nlp():
    return pytest.importorskip("gluonnlp", exc_type=ImportError)


@WITH_OLD_PACKAGES
def test_transformer_translates(nlp):
    encoder, decoder, one_step = nlp.model.transformer.get_transformer_encoder_decoder(
        num_layers=2, num_heads=4, units=32, hidden_size=64, max_src_length=16, max_tgt_length=16)
    vocabulary = nlp.Vocab(nlp.data.count_tokens([str(i) for i in range(WORDS - 4)]))
    net = nlp.model.translation.NMTModel(vocabulary, vocabulary, encoder, decoder, one_step,
                                         embed_size=32)
    lengths = nd.array([9, 5, 7, 2])
    masked = nlp.loss.MaskedSoftmaxCELoss()
    train(net, lambda out, label: masked(out[0], label, lengths),
          [words(4, 9), words(4, 9), lengths, lengths], words(4, 9))


@WITH_OLD_PACKAGES
def test_awd_lstm_models_language(nlp):
    net = nlp.model.train.AWDRNN("lstm", WORDS, 16, 24, 2, tie_weights=False, dropout=0.1,
                                 weight_drop=0.1)
    train(net, lambda out, label: SOFTMAX(out[0].reshape((-3, -1)), label.reshape((-1,))),
          [words(6, 4)], words(6, 4))


# GluonTS


@pytest.fixture()
def ts():
    pytest.importorskip("gluonts.mx", exc_type=ImportError)
    from gluonts import mx as package
    return package


def gluonts_trainer(ts, steps=24):
    """The trainer that GluonTS calls with a network and batches, with gluon_amp's three lines."""
    class Trainer(ts.Trainer):
        def __call__(self, net, train_iter, validation_iter=None):
            batches = iter(train_iter)
            net.initialize(mx.init.Xavier())
            net(*next(batches).values())
            amp.convert(net)
            trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3},
                                  clip_norm=10.0)
            for _ in range(steps):
                with autograd.record():
                    out = net(*next(batches).values())
                    loss = out[0] if isinstance(out, (list, tuple)) else out
                trainer.backward(loss)
                if trainer.step(len(loss)):
                    losses.append(loss.mean().asscalar())
            amp.restore(net)  # GluonTS creates its predictor from it

    losses = []
    return Trainer(), losses


ESTIMATORS = {
    "DeepAREstimator": {"context_length": 12, "num_cells": 8, "num_layers": 1},
    "SimpleFeedForwardEstimator": {"num_hidden_dimensions": [8]},
    "WaveNetEstimator": {"train_window_length": 24, "n_residue": 8, "n_skip": 8,
                         "dilation_depth": 2, "n_stacks": 1},
    "TransformerEstimator": {"context_length": 12, "model_dim": 8, "num_heads": 2},
    "MQCNNEstimator": {"context_length": 12, "decoder_mlp_dim_seq": [8],
                       "channels_seq": [4, 4, 4]},
    "MQRNNEstimator": {"context_length": 12, "decoder_mlp_dim_seq": [8]},
    "NBEATSEstimator": {"context_length": 12, "num_stacks": 2, "num_blocks": [1], "widths": [8]},
    "DeepFactorEstimator": {"context_length": 12, "num_hidden_global": 4, "num_factors": 2},
    "TemporalFusionTransformerEstimator": {"context_length": 12, "hidden_dim": 8, "num_heads": 2},
    "DeepStateEstimator": {"past_length": 24, "num_layers": 1, "num_cells": 4,
                           "cardinality": [1], "use_feat_static_cat": False},
}


@WITH_OLD_PACKAGES
@pytest.mark.parametrize("name", ESTIMATORS)
def test_gluonts_estimators_train_and_forecast(name, ts):
    from gluonts.dataset.common import ListDataset
    data = ListDataset([{"start": "2020-01-01", "target": 5 + np.sin(np.arange(80) + i),
                         "feat_static_cat": [0]} for i in range(4)], freq="D")
    trainer, losses = gluonts_trainer(ts)
    freq = {} if name == "SimpleFeedForwardEstimator" else {"freq": "D"}
    estimator = getattr(ts, name)(prediction_length=4, **ESTIMATORS[name], trainer=trainer,
                                  **freq, batch_size=4)
    predictor = estimator.train(data)
    assert len(losses) >= 4
    assert np.isfinite(losses).all()
    forecast = next(iter(predictor.predict(data)))
    assert np.isfinite(forecast.quantile(0.5)).all()
