"""Small networks of each family that GluonCV, GluonNLP and GluonTS have, in their own loops with
the three lines of gluon_amp. `make test-zoo` installs these packages; tests of those that are not
there are skipped."""
import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet import autograd, gluon, nd

pytestmark = pytest.mark.filterwarnings("default")  # those of the packages
WORDS = 40


def train(net, loss_fn, inputs, label, steps=12, rate=3e-3):
    """The README's loop on one batch."""
    net.initialize(mx.init.Xavier(), force_reinit=False)
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": rate})
    losses = []
    for _ in range(steps):
        with autograd.record():
            loss = loss_fn(net(*inputs), label)
        trainer.backward(loss)
        if trainer.step(len(label)):
            losses.append(loss.mean().asscalar())
    assert len(losses) >= steps - 4
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def words(*shape):
    return nd.array(np.random.randint(4, WORDS, shape))


SOFTMAX = gluon.loss.SoftmaxCrossEntropyLoss()

# GluonCV


@pytest.fixture()
def cv():
    pytest.importorskip("gluoncv", exc_type=ImportError)
    from gluoncv import model_zoo
    return model_zoo


def detection(size):
    """Two images with a box in each: corners, and its class."""
    boxes = nd.array([[[0.2, 0.3, 0.6, 0.8]], [[0.1, 0.1, 0.9, 0.5]]]) * size
    return nd.random.normal(shape=(2, 3, size, size)), boxes, nd.array([[[1]], [[0]]])


def loop(net, losses_of, steps=12, scale="dynamic"):
    """A loop over losses that a network's own code computes."""
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, loss_scale=scale)
    values = []
    for _ in range(steps):
        with autograd.record():
            losses = losses_of(net)
            total = sum(loss.mean() for loss in losses)
        trainer.backward(total)
        if trainer.step(1):
            values.append(total.asscalar())
    assert len(values) >= 3
    assert np.isfinite(values).all()
    assert values[-1] < values[0]


def test_ssd_detects(cv):
    from gluoncv.data.transforms.presets.ssd import SSDDefaultTrainTransform
    from gluoncv.loss import SSDMultiBoxLoss
    net = cv.get_model("ssd_512_mobilenet1.0_custom", classes=["a", "b"], pretrained_base=False)
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
    assert net(images)[0].shape[0] == 2  # predicting, it returns other things


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


# GluonNLP


@pytest.fixture()
def nlp():
    return pytest.importorskip("gluonnlp", exc_type=ImportError)


def test_bert_classifies(nlp):
    encoder = nlp.model.BERTEncoder(units=32, hidden_size=64, num_layers=2, max_length=16,
                                    num_heads=4)
    bert = nlp.model.BERTModel(encoder, WORDS, 2, 32, 32, use_decoder=False, use_classifier=False)
    train(nlp.model.BERTClassifier(bert, num_classes=2), SOFTMAX,
          [words(4, 12), nd.zeros((4, 12)), nd.array([12, 5, 7, 9])], nd.array([0, 1, 0, 1]))


def test_the_transformer_translates(nlp):
    encoder, decoder, one_step = nlp.model.transformer.get_transformer_encoder_decoder(
        num_layers=2, num_heads=4, units=32, hidden_size=64, max_src_length=16, max_tgt_length=16)
    vocabulary = nlp.Vocab(nlp.data.count_tokens([str(i) for i in range(WORDS - 4)]))
    net = nlp.model.translation.NMTModel(vocabulary, vocabulary, encoder, decoder, one_step,
                                         embed_size=32)
    lengths = nd.array([9, 5, 7, 2])
    masked = nlp.loss.MaskedSoftmaxCELoss()
    train(net, lambda out, label: masked(out[0], label, lengths),
          [words(4, 9), words(4, 9), lengths, lengths], words(4, 9))


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
    """What GluonTS calls with a network and batches, with gluon_amp's three lines."""
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
            amp.restore(net)  # GluonTS makes its predictor of it

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


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_of_gluonts_train_and_forecast(name, ts):
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
