"""Checks that an X-ray finds planted faults.

It plants each fault in each network and X-rays it. The planted block must be among the first three
findings, and with the X-ray's keep= the network must train as in float32. Without a fault there
must be no findings.

    python results/xray/planted.py [--networks NAME ...] [--faults NAME ...]
"""
import argparse
import sys

import gluon_amp as amp
import numpy as np
from common import agree, change, last, losses, write_csv
from gluon_amp._mxnet import mx
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn

STEPS = 30
CLASSES = 4

# ---- faults: blocks that map a tensor to one of the same shape --------------------------------


class Fault(gluon.HybridBlock):
    def __init__(self, function, **kwargs):
        super().__init__(prefix="planted_", **kwargs)
        self.function = function

    def hybrid_forward(self, F, x):
        return self.function(F, x)


def scaled_up_and_back(F, x):
    return (((x * 2.0 ** 12) * 2.0 ** 8) * 2.0 ** -10) * 2.0 ** -10


def squared_norm(F, x):
    y = x * 3000
    return F.sqrt(y * y + 1) * (1 / 3000)


def small_epsilon(F, x):
    y = x * 1e-4
    return y / F.sqrt(y * y + 1e-10)


def two_masks(F, x):
    lower = (x > 0.5) * -4e4
    return F.relu(x + lower + lower)


def long_sum(F, x):
    flat = F.abs(F.reshape(x, (0, 1, -1)))
    many = F.tile(F.slice_axis(flat, axis=2, begin=0, end=32), (1, 1, 1000)) * 100
    total = F.batch_dot(many, F.ones_like(many), transpose_b=True)
    return F.reshape_like(F.broadcast_mul(F.reshape(x, (0, 1, -1)), total * 1e-4), x)


FAULTS = {
    "an activation of 1e5": lambda F, x: F.tanh(x * 8) * 2e4 * 5 + x,
    "an exponent": lambda F, x: F.exp(F.relu(x) * 2 + 11),
    "a squared norm": squared_norm,
    "an epsilon of 1e-10": small_epsilon,
    "two masks of -4e4": two_masks,
    "a sum of many terms": long_sum,
    "gradients of 1e-13": lambda F, x: F.contrib.gradientmultiplier(x, scalar=1e-13),
    "scaled by 2^20 and back": scaled_up_and_back,
}

# ---- networks ---------------------------------------------------------------------------------


class Net(gluon.HybridBlock):
    """A network of parts, the fault, and other parts."""

    def __init__(self, before, after, fault):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.before, self.after = before(), after()
            self.fault = fault and Fault(fault)

    def hybrid_forward(self, F, x):
        x = self.before(x)
        return self.after(self.fault(x) if self.fault else x)


def chain(*layers):
    def make():
        net = nn.HybridSequential()
        for layer in layers:
            net.add(layer())
        return net
    return make


def conv(channels, **settings):
    return chain(lambda: nn.Conv2D(channels, 3, padding=1, **settings), nn.BatchNorm,
                 lambda: nn.Activation("relu"))


class Residual(gluon.HybridBlock):
    def __init__(self, channels=16):
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(conv(channels)(), nn.Conv2D(channels, 3, padding=1), nn.BatchNorm())

    def hybrid_forward(self, F, x):
        return F.relu(self.body(x) + x)


class Attention(gluon.HybridBlock):
    def __init__(self, width=32):
        super().__init__()
        with self.name_scope():
            self.qkv = nn.Dense(3 * width, flatten=False)
            self.out, self.norm = nn.Dense(width, flatten=False), nn.LayerNorm()
        self.width = width

    def hybrid_forward(self, F, x):
        q, k, v = F.split(self.qkv(x), num_outputs=3, axis=-1)
        weights = F.softmax(F.batch_dot(q, k, transpose_b=True) * self.width ** -0.5)
        return self.norm(x + self.out(F.batch_dot(weights, v)))


def pooled():
    return chain(nn.GlobalAvgPool2D, lambda: nn.Dense(CLASSES))


def dense(*widths):
    return chain(*(lambda w=w: nn.Dense(w, activation="relu") for w in widths))


def images(rng):
    return rng.standard_normal((16, 3, 12, 12))


def rows(rng):
    return rng.standard_normal((16, 40))


def sequences(rng):
    return rng.standard_normal((16, 10, 32))


NETWORKS = {
    "mlp": (dense(64, 64), chain(lambda: nn.Dense(32, activation="relu"),
                                 lambda: nn.Dense(CLASSES)), rows),
    "convolutions": (conv(16), chain(conv(16), pooled()), images),
    "resnet": (chain(conv(16), Residual), chain(Residual, pooled()), images),
    "mobilenet": (chain(conv(16), lambda: conv(16, groups=16)()),
                  chain(lambda: nn.Conv2D(24, 1), nn.BatchNorm, pooled()), images),
    "autoencoder": (conv(16), chain(lambda: nn.Conv2DTranspose(8, 2, strides=2), nn.BatchNorm,
                                    pooled()), images),
    "transformer": (chain(lambda: nn.Dense(32, flatten=False), Attention),
                    chain(Attention, lambda: nn.Dense(CLASSES)), sequences),
    "lstm": (chain(lambda: rnn.LSTM(32, layout="NTC", input_size=32)),
             chain(lambda: rnn.LSTM(16, layout="NTC", input_size=32),
                   lambda: nn.Dense(CLASSES)), sequences),
    "layer norms": (chain(lambda: nn.Dense(48), nn.LayerNorm, nn.GELU),
                    chain(lambda: nn.Dense(48), nn.LayerNorm, lambda: nn.Dense(CLASSES)), rows),
}
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def made(name, fault, policy="float16", keep=()):
    before, after, inputs = NETWORKS[name]
    mx.random.seed(3)
    np.random.seed(3)
    net = Net(before, after, fault)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    rng = np.random.default_rng(3)
    batches = []
    for _ in range(4):
        data = inputs(rng)
        label = np.digitize(data.reshape(len(data), -1)[:, :8].sum(1), [-1.5, 0, 1.5])
        batches.append((nd.array(data), nd.array(label)))
    net(batches[0][0])
    if policy != "float32":
        amp.convert(net, policy, keep=keep)
        net(batches[0][0])
    return net, batches


def trained(name, fault, policy, keep=(), scale=2.0 ** 16, seed=None):
    """Returns the mean of the last ten losses.

    Args:
        scale: the initial loss scale.
        seed: changes the initial weights by up to 2^-12 of their values.
    """
    net, batches = made(name, fault, policy, keep)
    if seed is not None:
        change(net, seed)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9},
                          clip_norm=1.0, loss_scale=None if policy == "float32" else
                          amp.DynamicLossScale(scale, minimum=2.0 ** -24))
    return last(losses(trainer, batches, lambda data, label: LOSS(net(data), label), STEPS))


def examine(name, fault):
    """Returns a row of the table."""
    net, batches = made(name, FAULTS.get(fault))
    view = amp.xray(net, batches, LOSS, steps=2)
    first = [finding.node for finding in view.findings[:3]]
    row = {"network": name, "fault": fault or "none", "named": " ".join(first),
           "found": any("planted_" in node for node in first) if fault else not view.findings,
           "keep": " ".join(view.keep)}
    kept, _ = made(name, FAULTS.get(fault), keep=view.keep)
    row["named after"] = " ".join(
        f.node for f in amp.xray(kept, batches, LOSS, steps=2).findings if not f.remedy)
    try:
        high = view.loss_scale[1] if view.loss_scale else 2.0 ** 16
        right, found = (trained(name, FAULTS.get(fault), "float32"),
                        trained(name, FAULTS.get(fault), "float16", view.keep,
                                min(high, 2.0 ** 16)))
        row["float32"], row["float16"] = round(right, 4), round(found, 4)
        row["trains"] = agree(found, right)
        if not row["trains"]:
            apart = max(abs(trained(name, FAULTS.get(fault), "float32", seed=seed) - right)
                        for seed in range(4))
            row["float32 from itself"] = round(apart, 4)
    except (amp.LossScaleError, ValueError) as error:
        row["trains"], row["error"] = False, str(error)[:90]
    return row


def show(row):
    print(f"{row['network']:13} {row['fault']:24} found {row['found']!s:5} trains "
          f"{row['trains']!s:5} {row.get('float32', ''):7} {row.get('float16', ''):7} "
          f"{row['named'][:70]} | {row['keep'][:60]} | {row['named after'][:60]} "
          f"{row.get('error', '')}", flush=True)


def conclude(table, output):
    planted = [row for row in table if row["fault"] != "none"]
    healthy = [row for row in table if row["fault"] == "none"]
    for what, group in (("planted faults", planted), ("healthy networks", healthy)):
        if group:
            print(f"{what}: {sum(r['found'] for r in group)} of {len(group)} correct; "
                  f"{sum(r['trains'] for r in group)} train as in float32; "
                  f"{sum(not r['named after'] for r in group)} have no findings with keep=")
    if output:
        write_csv(output, ["network", "fault", "found", "named", "keep", "named after", "trains",
                           "float32", "float16", "float32 from itself", "error"], table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--faults", nargs="*", default=[*FAULTS, ""], metavar="NAME")
    parser.add_argument("--output", metavar="CSV")
    options = parser.parse_args()
    table = []
    for name in options.networks:
        for fault in options.faults:
            table.append(examine(name, fault))
            show(table[-1])
    conclude(table, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
