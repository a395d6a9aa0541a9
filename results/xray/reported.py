"""Checks X-rays of faults that others reported, with rules that were fixed before.

Each fault is written as in its source, in a small network. The network trains

    in float32
    in plain float16        net.cast("float16"), and the same loss scaling
    with rules              the policy float16; also with a loss scale of 1 or more
    without rules           a policy under which norms, exponents and sums are float16, too

X-ray sees the network under the policy float16 if it does not train there, and otherwise under the
policy without rules. One of the operators of the fault must be among the first three findings, and
with keep= the network must train as in float32. Where the policy float16 suffices, an X-ray under
it should have no findings.

    python results/xray/reported.py [--faults NAME ...] [--output CSV]
"""
import math
import sys
from typing import Any, Callable, NamedTuple, Tuple

import gluon_amp as amp
import numpy as np
from common import BARE, agree, change, last, losses, tabulate
from gluon_amp._mxnet import mx
from mxnet import gluon, nd
from mxnet.gluon import nn
from planted import CLASSES, chain

STEPS = 40
COLUMNS = ("fault", "source", "expected", "float32 first", "float32", "plain float16", "with rules",
           "scale 1 or more", "without rules", "x-rayed under", "fails there", "named", "reasons",
           "found", "keep", "kept", "repaired", "float32 from itself", "named after",
           "named with rules")


# ---- networks -----------------------------------------------------------------------------------


class Function(gluon.HybridBlock):
    """A block without parameters."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def hybrid_forward(self, F, *inputs):
        return self.function(F, *inputs)


class Net(gluon.HybridBlock):
    """Layers, a block with a fault, and other layers with the cross entropy. Without `after`, the
    fault is the loss."""

    def __init__(self, before, fault, after):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.before, self.after = before(), after and after()
            self.fault = fault(prefix="reported_") if isinstance(fault, type) else \
                Function(fault, prefix="reported_")

    def hybrid_forward(self, F, x, *others):
        x = self.before(x)
        if self.after is None:
            return self.fault(x, *others)
        return -F.pick(F.log_softmax(self.after(self.fault(x, *others[:-1]))), others[-1])


def scaled(by, to=0.0):
    """Returns a layer that makes activations as large as in the report."""
    return lambda: nn.HybridLambda(lambda F, x: x * by + to)


def dense(width, **settings):
    return lambda: nn.Dense(width, flatten=False, **settings)


def head():
    return nn.Dense(CLASSES)


def normed_head():
    return chain(nn.LayerNorm, head)()


def labels(x):
    return np.digitize(x.reshape(len(x), -1)[:, :8].sum(1), [-1.5, 0, 1.5])


def normal(*shape):
    """Returns a maker of data and labels."""
    def make(rng):
        x = rng.standard_normal(shape)
        return x, labels(x)
    return make


def targets(*shape):
    """Returns a maker of 16 rows and of random targets, some of which are 1 and the others 0."""
    return lambda rng: (rng.standard_normal((16, 40)), rng.random((16, *shape)) < 0.3)


ROWS = normal(16, 40)
SEQUENCES = normal(16, 10, 32)
IMAGES = normal(8, 3, 12, 12)


# ---- attention ----------------------------------------------------------------------------------


class Attention(gluon.HybridBlock):
    """Attention whose scores are divided after the product."""

    def __init__(self, width=32, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.qkv = nn.Dense(3 * width, flatten=False)
        self.width = width

    def masked(self, F, scores, x):
        return scores

    def hybrid_forward(self, F, x):
        q, k, v = F.split(self.qkv(x), num_outputs=3, axis=-1)
        scores = F.batch_dot(q, k, transpose_b=True) / math.sqrt(self.width)
        return F.batch_dot(F.softmax(self.masked(F, scores, x)), v)


class CausalAttention(Attention):
    """Attention with a mask of -1e10."""

    def masked(self, F, scores, x):
        place = F.contrib.arange_like(x, axis=1)
        mask = F.broadcast_lesser_equal(place.expand_dims(0), place.expand_dims(1)).expand_dims(0)
        return F.broadcast_sub(F.broadcast_mul(scores, mask), 1e10 * (1 - mask))


class LinearAttention(gluon.HybridBlock):
    """Attention by positive features, normalized by their sum over the sequence."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.qkv = nn.Dense(48, flatten=False)

    def features(self, F, x, *others):
        return F.relu(x) + 1e-6

    def hybrid_forward(self, F, x, *others):
        q, k, v = F.split(self.qkv(x), num_outputs=3, axis=-1)
        q, k = self.features(F, q, *others), self.features(F, k, *others)
        total = F.sum(k, axis=1, keepdims=True)
        return F.broadcast_div(F.batch_dot(q, F.batch_dot(k, v, transpose_a=True)),
                               F.batch_dot(q, total, transpose_b=True) + 1e-6)


class RandomFeatures(LinearAttention):
    """Attention by positive random features, exp(x w - x^2 / 2)."""

    def features(self, F, x, w):
        return F.exp(F.broadcast_sub(F.dot(x, w), F.sum(x * x, axis=-1, keepdims=True) / 2))

    def hybrid_forward(self, F, x, w):
        q, k, v = F.split(self.qkv(x), num_outputs=3, axis=-1)
        q, k = self.features(F, q, w), self.features(F, k, w)
        total = F.sum(k, axis=1, keepdims=True)
        return F.broadcast_div(F.batch_dot(q, F.batch_dot(k, v, transpose_a=True)),
                               F.batch_dot(q, total, transpose_b=True))


def random_features(rng):
    x, label = SEQUENCES(rng)
    return x, np.random.default_rng(0).standard_normal((16, 32)), label


def rotary(F, x):
    """Positions times two frequencies; their cosines and sines."""
    place = F.contrib.arange_like(x, axis=1).expand_dims(0).expand_dims(2)
    angles = [F.broadcast_add(F.zeros_like(F.slice_axis(x, axis=2, begin=0, end=1)), place) * f
              for f in (10000 ** (-2 / 32), 10000 ** (-6 / 32))]
    return F.concat(*(F.cos(a) for a in angles), *(F.sin(a) for a in angles), x * 0.1, dim=2)


def positions(rng):
    angle = np.arange(4096) * 10000 ** (-2 / 32)
    return rng.standard_normal((2, 4096, 4)), np.tile(np.floor(angle / (math.pi / 2)) % 4, (2, 1))


def wavelengths(F, x):
    angles = [x * (2 * math.pi / length) for length in (4, 32)]
    return F.concat(*(F.cos(a) for a in angles), *(F.sin(a) for a in angles), dim=2)


def masses(rng):
    x = rng.uniform(100, 2000, (16, 64, 1))
    return x, np.floor(x[:, :, 0]) % 4


# ---- norms --------------------------------------------------------------------------------------


def root_mean_square(F, x):
    return F.broadcast_mul(x, F.rsqrt(F.mean(x ** 2, axis=-1, keepdims=True) + 1e-6))


def channels_first(F, x):
    u = F.mean(x, axis=1, keepdims=True)
    s = F.mean(F.broadcast_sub(x, u) ** 2, axis=1, keepdims=True)
    return F.broadcast_div(F.broadcast_sub(x, u), F.sqrt(s + 1e-6))


def instance_norm(F, x):
    mean = F.mean(x, axis=(2, 3), keepdims=True)
    variance = F.mean(x * x, axis=(2, 3), keepdims=True) - mean * mean
    return F.broadcast_div(F.broadcast_sub(x, mean), F.sqrt(variance + 1e-5))


def layer_norm(F, x):
    mean = F.mean(x, axis=-1, keepdims=True)
    centred = F.broadcast_sub(x, mean)
    variance = F.mean(centred * centred, axis=-1, keepdims=True)
    return F.broadcast_div(centred, F.sqrt(variance + 1e-12))


def unit_length(F, x):
    squares = F.sum(F.square(x), axis=-1, keepdims=True)
    return F.broadcast_mul(x, F.rsqrt(F.maximum(squares, 1e-12)))


def padded(rng):
    """Rows of which some are padding, that is 0."""
    x, label = ROWS(rng)
    x[::5] = 0
    return x, label


class Demodulated(gluon.HybridBlock):
    """A layer whose weights are multiplied by a style and divided by their norm."""

    def __init__(self, width=32, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(1, width, width),
                                          init=mx.init.Normal(1))
            self.style = nn.Dense(width)

    def hybrid_forward(self, F, x, weight):
        w = F.broadcast_mul(weight, self.style(x * 100).expand_dims(1))
        w = F.broadcast_mul(w, F.rsqrt(F.sum(w ** 2, axis=2, keepdims=True) + 1e-8))
        return F.batch_dot(w, x.expand_dims(2)).reshape((0, -1))


class FeedForward(gluon.HybridBlock):
    """A feed-forward layer with weights that are as large as those of a trained T5."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.norm = nn.LayerNorm()
            self.wi = nn.Dense(64, use_bias=False, weight_initializer=mx.init.Normal(20))
            self.wo = nn.Dense(32, use_bias=False, weight_initializer=mx.init.Normal(60))

    def hybrid_forward(self, F, x):
        return x + self.wo(F.relu(self.wi(self.norm(x))))


# ---- activations and pooling ---------------------------------------------------------------------


def gelu(F, x):
    return 0.5 * x * (1 + F.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def mish(F, x):
    return x * F.tanh(F.log(1 + F.exp(x)))


def masked_mean(F, x, mask):
    total = F.sum(F.broadcast_mul(x, mask.expand_dims(2)), axis=1)
    return F.broadcast_div(total, F.sum(mask, axis=1, keepdims=True))


def long_sequences(rng):
    x, label = normal(4, 4096, 8)(rng)
    return x, np.ones((4, 4096)), label


def gumbel(F, x, uniform):
    noise = -F.log(-F.log(uniform + 1e-20) + 1e-20)
    return F.softmax((x + noise) / 0.5)


def with_noise(rng):
    x, label = ROWS(rng)
    return x, rng.random((16, 256)), label


class LogMel(gluon.HybridBlock):
    """The logarithm of the power of frames in bands of frequency."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        angles = 2 * np.pi / 1024 * np.outer(np.arange(1024), np.arange(64))
        bands = np.repeat(np.eye(16), 4, axis=0) / 4
        with self.name_scope():
            self.re, self.im, self.bands = (
                self.params.get_constant(name, nd.array(array)) for name, array in
                (("re", np.cos(angles)), ("im", np.sin(angles)), ("bands", bands)))

    def hybrid_forward(self, F, x, re, im, bands):
        power = F.dot(x, re) ** 2 + F.dot(x, im) ** 2
        return F.log(F.dot(power, bands) + 1e-10)


def sounds(rng):
    """Tones of full loudness, of which the last frame is silent."""
    label = rng.integers(0, CLASSES, 8)
    phase = np.arange(4 * 1024) * 2 * np.pi / 1024
    tones = np.sin(np.outer(3 + 8 * label, phase)) + 0.1 * rng.standard_normal((8, 4096))
    tones[:, -1024:] = 0
    return tones.reshape((8, 4, 1024)), label


# ---- distances -----------------------------------------------------------------------------------


def cosine(F, x, y, wanted):
    product = F.sum(x * y, axis=1)
    squares = F.sum(x * x, axis=1) * F.sum(y * y, axis=1)
    return F.square(product / F.sqrt(F.maximum(squares, 1e-16)) - wanted)


def two_vectors(rng):
    return (rng.standard_normal((16, 40)), 3 * rng.standard_normal((16, 512)),
            rng.choice([-1.0, 1.0], 16))


def distances(F, x, codes):
    squares = F.broadcast_add(F.sum(x * x, axis=1, keepdims=True),
                              F.reshape(F.sum(codes * codes, axis=1), (1, -1)))
    return -F.sqrt(F.maximum(squares - 2 * F.dot(x, codes, transpose_b=True), 0))


def with_codes(rng):
    x, label = ROWS(rng)
    return x, 8 + 0.3 * np.random.default_rng(0).standard_normal((CLASSES, 64)), label


class ArcFace(gluon.HybridBlock):
    """A margin on the angle to the class's weights; the scale is 64."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(CLASSES, 2), init=mx.init.Normal(1))

    def hybrid_forward(self, F, x, own, label, weight):
        cos = F.dot(F.L2Normalization(x), F.L2Normalization(weight), transpose_b=True)
        sin = F.sqrt(F.clip(1 - cos ** 2, 0, 1))
        moved = cos * math.cos(0.5) - sin * math.sin(0.5)
        return -F.pick(F.log_softmax(64 * (own * moved + (1 - own) * cos)), label)


def with_own_class(rng):
    x, label = ROWS(rng)
    return x, np.eye(CLASSES)[label], label


# ---- losses -------------------------------------------------------------------------------------


def label_smoothing(F, x, label):
    log_p = -F.log_softmax(x)
    return 0.9 * F.pick(log_p, label) + 0.1 * F.sum(log_p, axis=-1) / 8192


def log_of_softmax(F, x, label):
    return -F.pick(F.log(F.softmax(x)), label)


def focal(F, x, y):
    p = F.sigmoid(x)
    right = 0.75 * y * (1 - p) ** 2 * F.log(F.clip(p, 1e-8, 1))
    return -F.mean(right + 0.25 * (1 - y) * p ** 2 * F.log(F.clip(1 - p, 1e-8, 1)), axis=1)


def cross_entropy(F, x, y):
    p = F.sigmoid(x)
    return -F.mean(F.log(p + 1e-12) * y + F.log(1 - p + 1e-12) * (1 - y), axis=1)


def dice(F, x, y):
    p = F.sigmoid(x)
    return 1 - (2 * F.sum(p * y) + 1) / (F.sum(p + y) + 1)


def segments(rng):
    x = rng.standard_normal((1, 1, 384, 384))
    return x, x > 0.5


def summed_pixels(F, x, y):
    return F.sum(F.relu(x) - x * y + F.Activation(-F.abs(x), act_type="softrelu"))


def pictures(rng):
    x = rng.random((128, 3072))
    return x, x


def divergence(F, x, mean):
    own, raw = F.split(x, num_outputs=2, axis=1)
    ratio = ((F.Activation(raw, act_type="softrelu") + 1e-6) / 0.003) ** 2
    return F.mean(0.5 * (ratio + ((own - mean) / 0.003) ** 2 - 1 - F.log(ratio)), axis=1)


def contrast(F, x, pairs, others):
    alike = F.exp(F.dot(F.L2Normalization(x), F.L2Normalization(x), transpose_b=True) / 0.07)
    return -F.log(F.sum(alike * pairs, axis=1) / F.sum(alike * others, axis=1))


def views(rng):
    x = np.repeat(rng.standard_normal((16, 40)), 2, axis=0)
    pairs = np.kron(np.eye(16), 1 - np.eye(2))
    return x + 0.3 * rng.standard_normal(x.shape), pairs, 1 - np.eye(32)


def sinkhorn(F, x):
    q = F.exp(F.BlockGrad(x) / 0.05)
    q = F.broadcast_div(q, F.sum(q))
    for _ in range(3):
        q = F.broadcast_div(q, F.sum(q, axis=0, keepdims=True)) / 12
        q = F.broadcast_div(q, F.sum(q, axis=1, keepdims=True)) / 16
    return -F.sum(16 * F.BlockGrad(q) * F.log_softmax(x / 0.1), axis=1)


def squared_error(F, x, y):
    return F.mean(F.square(x - y), axis=1)


# ---- the faults ---------------------------------------------------------------------------------


class Case(NamedTuple):
    """A fault.

    Attributes:
        source: where it was reported: a repository with the number of an issue or pull request.
        expected: the operators of which X-ray should name one, in the block with the fault;
            "data" stands for an input of the network.
        data: returns the arrays of a batch, given a random number generator.
        before, after: the layers around the fault; without `after`, the fault is the loss.
        fault: a function of F and arrays, or a class of blocks.
        adam: whether the optimizer is Adam on float16 weights, in plain float16.
    """
    source: str
    expected: Tuple[str, ...]
    data: Callable
    before: Callable
    fault: Any
    after: Any = None
    adam: bool = False


def tokens(scale):
    return chain(dense(32), scaled(scale))


def outputs(width, scale=1.0):
    return chain(dense(32, activation="relu"), dense(width), scaled(scale))


FAULTS = {
    "attention divided after the product": Case(
        "pytorch/pytorch pull 60940", ("batch_dot",), SEQUENCES, tokens(150), Attention,
        normed_head),
    "a mask of -1e10": Case(
        "openai/gpt-2 pull 122", ("_mul_scalar", "broadcast_sub"), SEQUENCES, tokens(1),
        CausalAttention, normed_head),
    "linear attention": Case(
        "idiap/fast-transformers issue 32; LeapLabTHU/FLatten-Transformer issue 15",
        ("batch_dot", "sum"), normal(2, 1024, 16), chain(dense(16), scaled(10)), LinearAttention,
        chain(lambda: nn.HybridLambda(lambda F, x: F.mean(x, axis=1)), head)),
    "random features": Case(
        "facebookresearch/xformers issue 96", ("exp",), random_features, tokens(1.5),
        RandomFeatures, head),
    "rotary positions": Case(
        "EleutherAI/gpt-neox issue 1003; NVIDIA/Megatron-LM issue 535",
        ("_mul_scalar", "cos", "sin"), positions, chain(), rotary, dense(CLASSES)),
    "masses as data": Case(
        "wfondrie/depthcharge pull 82", ("data", "_mul_scalar", "cos", "sin"), masses, chain(),
        wavelengths, dense(CLASSES)),
    "root mean square": Case(
        "meta-llama/llama issue 1048; pytorch/pytorch pull 133085", ("_power_scalar",), ROWS,
        chain(dense(48), scaled(500)), root_mean_square, head),
    "layer norm of channels": Case(
        "facebookresearch/ConvNeXt issue 80", ("_power_scalar",), IMAGES,
        chain(lambda: nn.Conv2D(16, 3), scaled(400)), channels_first, head),
    "variance by squares": Case(
        "Tencent/ncnn issue 3519; tensorflow/tensorflow issue 47156", ("elemwise_sub",), IMAGES,
        chain(lambda: nn.Conv2D(16, 3), scaled(3, 150)), instance_norm, head),
    "layer norm, epsilon 1e-12": Case(
        "pytorch/pytorch issue 41527; keras-team/keras issue 22586",
        ("_plus_scalar", "sqrt", "broadcast_div"), padded, chain(dense(32, use_bias=False)),
        layer_norm, head),
    "unit length, epsilon 1e-12": Case(
        "pytorch/pytorch issue 32137", ("_maximum_scalar", "rsqrt"), padded,
        chain(dense(32, use_bias=False)), unit_length, head),
    "demodulated weights": Case(
        "NVlabs/stylegan2-ada-pytorch, Pre-normalize inputs to avoid FP16 overflow",
        ("_power_scalar", "sum"), ROWS, chain(dense(32), nn.LayerNorm), Demodulated, head),
    "feed-forward layer of T5": Case(
        "huggingface/transformers issue 5651", ("FullyConnected",), ROWS, chain(dense(32)),
        FeedForward, normed_head),
    "GELU by a cube": Case(
        "facebookresearch/fairseq issue 2235; pytorch/executorch issue 22323", ("elemwise_mul",),
        ROWS,
        chain(dense(48), scaled(150)), gelu, normed_head),
    "mish": Case(
        "hunglc007/tensorflow-yolov4-tflite issue 1; apple/coremltools pull 2725", ("exp",), ROWS,
        chain(dense(48), scaled(8)), mish, normed_head),
    "a sum, divided": Case(
        "pytorch/pytorch issue 91597; apache/tvm pull 8810", ("sum",), long_sequences,
        chain(dense(8, activation="relu"), scaled(60)), masked_mean, normed_head),
    "Gumbel noise": Case(
        "pytorch/pytorch issues 41663 and 34372", ("log", "_plus_scalar"), with_noise,
        chain(dense(256)), gumbel, head),
    "power in bands": Case(
        "adobe-research/convmelspec pull 3", ("_power_scalar", "_plus_scalar", "log"), sounds,
        chain(), LogMel, head),
    "cosine similarity": Case(
        "pytorch/pytorch issues 69512 and 65298", ("elemwise_mul",), two_vectors,
        chain(dense(512)), cosine),
    "distances by products": Case(
        "lucidrains/vector-quantize-pytorch issue 106; NVIDIA/cuvs issue 991", ("broadcast_sub",
                                                                               "elemwise_sub"),
        with_codes, chain(dense(64), scaled(0.3, 8)), distances, chain()),
    "angular margin": Case(
        "THUFutureLab/gluon-face issue 38", ("_rminus_scalar", "_power_scalar", "sqrt"),
        with_own_class, chain(dense(32, activation="relu"), dense(2)), ArcFace),
    "label smoothing": Case(
        "huggingface/transformers issue 10674", ("sum",), ROWS,
        chain(dense(32), scaled(100), dense(8192)), label_smoothing),
    "logarithm of softmax": Case(
        "NVIDIA/apex issue 379; dmlc/gluon-cv issue 942", ("log", "softmax"), ROWS,
        outputs(CLASSES, 15), log_of_softmax),
    "focal loss": Case(
        "fudannlp16/focal-loss issue 4; mkocabas/focal-loss-keras issue 17", ("clip", "log"),
        targets(10), outputs(10, 15), focal),
    "cross entropy of sigmoids": Case(
        "pytorch/pytorch issue 61098; apache/mxnet pull 7670",
        ("log", "_plus_scalar", "_rminus_scalar"), targets(10), outputs(10, 15), cross_entropy),
    "Dice loss": Case(
        "qubvel-org/segmentation_models.pytorch issue 463", ("sum",), segments,
        chain(lambda: nn.Conv2D(8, 3, padding=1, activation="relu"), lambda: nn.Conv2D(1, 1)),
        dice),
    "loss summed over pixels": Case(
        "chainer/chainer pull 7362; NVIDIA/apex issue 812", ("sum",), pictures,
        chain(dense(64, activation="relu"), dense(3072)), summed_pixels),
    "divergence of normals": Case(
        "NVIDIA/apex issue 812", ("_power_scalar",), targets(8), outputs(16), divergence),
    "contrast, temperature 0.07": Case(
        "Lightning-Universe/lightning-bolts issues 320 and 811", ("exp",), views, outputs(32),
        contrast),
    "Sinkhorn": Case(
        "facebookresearch/swav issue 67; facebookresearch/dinov2 pull 583", ("exp",),
        lambda rng: (rng.standard_normal((16, 40)),),
        chain(dense(8), lambda: nn.HybridLambda(lambda F, x: F.L2Normalization(x)),
              dense(12, use_bias=False)), sinkhorn),
    "Adam, epsilon 1e-8": Case(
        "apache/mxnet issue 5384; keras-team/keras issue 11860", ("adam_update",), targets(10),
        outputs(10), squared_error, adam=True),
}


# ---- training -----------------------------------------------------------------------------------


def made(case, policy, keep=()):
    """Returns an initialized network and its batches. The policy "plain" is `net.cast`."""
    mx.random.seed(3)
    np.random.seed(3)
    net = Net(case.before, case.fault, case.after)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    rng = np.random.default_rng(3)
    batches = [tuple(map(nd.array, case.data(rng))) for _ in range(4)]
    net(*batches[0])
    if policy == "plain":
        net.cast("float16")
        batches = [tuple(array.astype("float16") for array in batch) for batch in batches]
    elif policy != "float32":
        amp.convert(net, policy, keep=keep)
    net(*batches[0])
    return net, batches


def trained(case, policy, keep=(), seed=None, smallest=2.0 ** -24):
    """Returns the losses; NaN if no loss scale has finite gradients.

    Args:
        seed: changes the weights.
        smallest: the smallest loss scale.
    """
    net, batches = made(case, policy, keep)
    if seed is not None:
        change(net, seed)
    settings = {"learning_rate": 0.01, "momentum": 0.9}
    if case.adam:
        settings = {"learning_rate": 0.01}
    if case.adam and policy == "plain":
        trainer = gluon.Trainer(net.collect_params(), "adam", settings)
        trainer.backward = lambda loss: loss.backward()
    else:
        if policy == "plain":
            settings["multi_precision"] = True
        trainer = amp.Trainer(net.collect_params(), "adam" if case.adam else "sgd", settings,
                              clip_norm=1.0, loss_scale=None if policy == "float32" else
                              amp.DynamicLossScale(2.0 ** 16, minimum=smallest))
    try:
        return losses(trainer, batches, lambda *batch: net(*batch).astype("float32"), STEPS)
    except amp.LossScaleError:
        return [math.nan]


def loss_of(output, _):
    return output


def xrayed(case, policy, keep=()):
    net, batches = made(case, policy, keep)
    return amp.xray(net, [(*batch, nd.zeros(1)) for batch in batches], loss_of, steps=2)


def examine(name):
    """Returns a row of the table."""
    case = FAULTS[name]
    right, plain, ruled, bare = (trained(case, policy) for policy in
                                 ("float32", "plain", "float16", BARE))
    row = {"fault": name, "source": case.source, "expected": " ".join(case.expected),
           "float32 first": round(right[0], 4), "float32": round(last(right), 4),
           "plain float16": round(last(plain), 4), "with rules": round(last(ruled), 4),
           "without rules": round(last(bare), 4),
           "scale 1 or more": round(last(trained(case, "float16", smallest=1.0)), 4)}
    policy = BARE if agree(last(ruled), last(right)) else "float16"
    view = xrayed(case, policy)
    operators = {tensor.key.node: tensor.op for tensor in view.tensors}
    first = [finding.node for finding in view.findings[:3]]
    kept = last(trained(case, policy, view.keep))
    row.update({
        "x-rayed under": "without rules" if policy is BARE else policy,
        "fails there": not agree(last(bare if policy is BARE else ruled), last(right)),
        "named": " ".join(first),
        "reasons": "; ".join(finding.reason for finding in view.findings[:3]),
        "found": any(operators.get(node, "data") in case.expected
                     and (node.startswith("net_reported_") or node not in operators)
                     for node in first),
        "keep": " ".join(view.keep), "kept": round(kept, 4),
        "repaired": agree(kept, last(right)),
        "named after": " ".join(finding.node for finding in
                                xrayed(case, policy, view.keep).findings if not finding.remedy)})
    if policy is BARE:
        row["named with rules"] = " ".join(
            finding.node for finding in xrayed(case, "float16").findings)
    if not row["repaired"]:
        row["float32 from itself"] = round(max(
            abs(last(trained(case, "float32", seed=seed)) - last(right)) for seed in range(4)), 4)
    return row


def main():
    table = tabulate(__doc__, "faults", list(FAULTS), examine, COLUMNS)
    failing = [row for row in table if row["fails there"]]
    print(f"{len(failing)} of {len(table)} faults fail under the policy; of these X-ray finds "
          f"{sum(row['found'] for row in failing)}, and keep= repairs "
          f"{sum(row['repaired'] for row in failing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
