"""Compares `amp.search` with the operator table.

It converts five networks with a policy without rules, where norms, softmax, exponentials, sums and
losses run in float16, and runs `amp.search` for keep=. It compares the result with the policy
float16: nodes in float32, casts, and the signal-to-noise ratio of gradients.

    python results/xray/search.py [--networks NAME ...] [--budget SECONDS]
"""
import argparse
import sys

import gluon_amp as amp
import numpy as np
from common import BARE, write_csv
from gluon_amp._mxnet import mx
from gluon_amp.graph.operators import NORM, SENSITIVE, runs_in
from gluon_amp.inspection.measurements import Measurements, TrainingSettings
from gluon_amp.inspection.session import Session
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn
from planted import Attention

COLUMNS = ("network", "bare_db", "bare_casts", "rules_nodes", "rules_db", "rules_casts",
           "search_nodes", "search_db", "search_casts", "verified", "trainings", "keep")


class Classifier(gluon.HybridBlock):
    """A body with the cross entropy of its output in the graph."""

    def __init__(self, body):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body = body()

    def hybrid_forward(self, F, x, label):
        return -F.pick(F.log_softmax(self.body(x)), label)


class RootMeanSquare(gluon.HybridBlock):
    """A hand-written norm of numbers of some hundreds, whose squares overflow float16."""

    def hybrid_forward(self, F, x):
        x = x * 256
        square = F.mean(F.square(x), axis=-1, keepdims=True)
        return F.broadcast_mul(x, F.rsqrt(square + 1))


class Autoencoder(gluon.HybridBlock):
    """A variational autoencoder. Its loss is a sum over pixels, which overflows float16, and a
    divergence."""

    def __init__(self, hidden=8):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.encode, self.decode = nn.Dense(64, activation="relu"), nn.Dense(784)
            self.mean, self.spread = nn.Dense(hidden), nn.Dense(hidden)
        self.hidden = hidden

    def hybrid_forward(self, F, x):
        h = self.encode(x)
        mean, spread = self.mean(h), self.spread(h)
        z = mean + F.exp(spread * 0.5)
        error = F.sum(F.square(self.decode(z) - x * 60), axis=1)
        divergence = 0.5 * F.sum(F.square(mean) + F.exp(spread) - spread - 1, axis=1)
        return error + divergence


class Contrast(gluon.HybridBlock):
    """A contrastive loss on two views of the same rows."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Dense(64, activation="relu"), nn.Dense(32))

    def hybrid_forward(self, F, x, y):
        a, b = F.L2Normalization(self.body(x)), F.L2Normalization(self.body(y))
        alike = F.exp(F.dot(a, b, transpose_b=True) * 14)
        right = F.sum(a * b, axis=1) * 14
        return F.log(F.sum(alike, axis=1)) - right


def layers(*made):
    net = nn.HybridSequential()
    for layer in made:
        net.add(layer)
    return net


def rows(rng):
    x = rng.standard_normal((16, 40))
    return x, np.digitize(x[:, :8].sum(1), [-1.5, 0, 1.5])


def sequences(rng):
    x = rng.standard_normal((16, 10, 32))
    return x, np.digitize(x[:, 0, :8].sum(1), [-1.5, 0, 1.5])


def images(rng):
    return (rng.random((16, 784)) ** 2,)


def views(rng):
    x = rng.standard_normal((16, 40))
    return x, x + 0.3 * rng.standard_normal(x.shape)


NETWORKS = {
    "transformer": (lambda: Classifier(lambda: layers(
        nn.Dense(32, flatten=False), Attention(), nn.GELU(), Attention(), nn.Dense(4))), sequences),
    "norms by hand": (lambda: Classifier(lambda: layers(
        nn.Dense(48), RootMeanSquare(), nn.Activation("relu"), nn.Dense(48), RootMeanSquare(),
        nn.Dense(4))), rows),
    "lstm": (lambda: Classifier(lambda: layers(
        rnn.LSTM(32, layout="NTC", input_size=32), nn.LayerNorm(), nn.Dense(4))), sequences),
    "autoencoder": (Autoencoder, images),
    "contrast": (Contrast, views),
}


def made(name, policy):
    """Returns an initialized and converted network, and its batches."""
    make, inputs = NETWORKS[name]
    mx.random.seed(3)
    np.random.seed(3)
    net = make()
    net.initialize(mx.init.Xavier())
    rng = np.random.default_rng(3)
    batches = [(*map(nd.array, inputs(rng)), nd.zeros(16)) for _ in range(8)]
    amp.convert(net, policy)
    net(*batches[0][:-1])
    return net, batches


def loss_of(output, _):
    return output


def measured(net, batches):
    """Returns the signal-to-noise ratio of a network's gradients, and its number of casts."""
    settings = TrainingSettings(2, 1, 0, "adam", ())
    with Session(net, batches, loss_of, len(batches), "search") as session:
        made = Measurements(session, 1e9, settings, None, lambda text: None)
        return round(made.snr(frozenset()), 1), made.casts(frozenset())


def by_the_rules(name):
    """Returns nodes in float32, the ratio and casts under the policy float16."""
    net, batches = made(name, "float16")
    graph, _ = net.mixed_graph(["float32"] * (len(batches[0]) - 1))
    kept = [n for n in graph.nodes() if not n.is_variable and runs_in(n) in (NORM, SENSITIVE)]
    return (len(kept), *measured(net, batches))


def examine(name, budget):
    """Returns a row of the table."""
    net, batches = made(name, BARE)
    found = amp.search(net, batches, loss_of, budget=budget,
                       optimizer_params={"learning_rate": 0.002})
    best = found.best
    return dict(zip(COLUMNS, (
        name, *measured(net, batches), *by_the_rules(name), len(best.nodes), round(best.snr, 1),
        best.casts, found.verified, found.runs, " ".join(found.keep))))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--budget", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--output", metavar="CSV")
    options = parser.parse_args()
    table = []
    for name in options.networks:
        table.append(examine(name, options.budget))
        print(", ".join(f"{key} {value}" for key, value in table[-1].items()), flush=True)
    fewer = sum(r["search_nodes"] <= r["rules_nodes"] and r["verified"] for r in table)
    print(f"{fewer} of {len(table)}: no more nodes than with the rules, and trains as in float32")
    if options.output:
        write_csv(options.output, COLUMNS, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
