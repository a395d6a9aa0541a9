"""Measures the effect of Tensor Cores' sums on training: `python results/tensor_cores/run.py`.

It trains the same networks with float32 sums and with the sums of V100 and A100, in one chain and
in pieces. It also compares the weight gradients of one batch. runs.jsonl and gradients.jsonl in
this folder have the completed runs; another call continues. At the end it prints the tables of
README.md; with --tables it only prints them.
"""
import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "example"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import gluon_amp as amp
import mxnet as mx
import numpy as np
import study as shared
from gluon_amp.reports.verdict import conclusion, paired
from images import small_network, zoo_network
from mxnet import autograd, gluon, nd

RUNS = Path(__file__).with_name("runs.jsonl")
GRADIENTS = Path(__file__).with_name("gradients.jsonl")

# Name: the GPU, and whether its chains are split.
SUMS = {"float32": (None, False), "V100": ("V100", False), "V100 in pieces": ("V100", True),
        "A100": ("A100", False), "A100 in pieces": ("A100", True)}
# Epochs, batch size, learning rate, products in a piece, seeds.
STUDIES = {"digits": (6, 64, 0.1, 512, 10), "cifar10": (2, 50, 0.02, 4096, 5)}


# ---- trainings

def digits():
    """Returns training and test images and labels of scikit-learn's digits."""
    from sklearn.datasets import load_digits
    data = load_digits()
    images = (data.images[:, None].astype("float32") / 16 - 0.45) / 0.25
    order = np.random.RandomState(0).permutation(len(images))
    images, labels = images[order], data.target[order].astype("float32")
    return (images[:1347], labels[:1347]), (images[1347:], labels[1347:])


def cifar10(train=1000, test=1000):
    """Returns the first images of the two files."""
    def first(name, count):
        dataset = gluon.data.vision.ImageRecordDataset(str(shared.SHARED / "data" / name))
        pairs = [dataset[i] for i in range(count)]
        images = np.stack([image.asnumpy() for image, _ in pairs]).transpose(0, 3, 1, 2)
        return ((images.astype("float32") / 255 - 0.45) / 0.25,
                np.array([label for _, label in pairs], "float32"))
    return first("cifar10_train.rec", train), first("cifar10_test.rec", test)


def network(study, sums):
    gpu, cut = SUMS[sums]
    net = small_network(10) if study == "digits" else zoo_network("cifar_resnet20_v1", classes=10)
    net.initialize(mx.init.Xavier())
    split = STUDIES[study][3] if cut else None
    return amp.convert(net, amp.Policy(sums, parameter="float16", compute="float16",
                                       accumulate=gpu, split=split))


def take_trained_values(net, but=()):
    """Loads the parameters of a trained ResNet-20, except those whose names contain given words.
    """
    file = nd.load(str(shared.SHARED / "models" / "cifar_resnet20_v1-0000.params"))
    parameters = net.collect_params()
    assert [n.split("_")[-1] for n in file] == [n.split("_")[-1] for n in parameters]
    for parameter, array in zip(parameters.values(), file.values()):
        if not any(word in parameter.name for word in but):
            parameter.set_data(array.astype(parameter.dtype))


def train(study, sums, seed):
    """Trains a run: returns test accuracy and mean training loss of each epoch. A run of cifar10 is
    short: it fine-tunes a trained network with a new classifier."""
    epochs, batch, rate, _, _ = STUDIES[study]
    mx.random.seed(seed)
    np.random.seed(seed)
    (x, y), (test_x, test_y) = globals()[study]()
    net = network(study, sums)
    if study == "cifar10":
        net(nd.array(x[:1]))
        take_trained_values(net, but=["dense"])
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    steps = epochs * (len(x) // batch)
    trainer = amp.Trainer(net.collect_params(), "sgd", {
        "momentum": 0.9, "wd": 1e-4,
        "lr_scheduler": mx.lr_scheduler.CosineScheduler(steps, rate)})
    losses, accuracy = [], []
    for _ in range(epochs):
        order, total = np.random.permutation(len(x)), 0.0
        for i in range(len(x) // batch):
            some = order[i * batch:(i + 1) * batch]
            with autograd.record():
                loss = loss_fn(net(nd.array(x[some])), nd.array(y[some]))
            trainer.backward(loss)
            trainer.step(batch)
            total += float(loss.mean().asscalar())
        right = [net(nd.array(test_x[i:i + 100])).asnumpy().argmax(1) == test_y[i:i + 100]
                 for i in range(0, len(test_x), 100)]
        losses.append(total / (len(x) // batch))
        accuracy.append(100 * float(np.concatenate(right).mean()))
    return {"accuracy": accuracy, "loss": losses}


# ---- gradients of one batch


def weight_gradients(study, seed):
    """Returns for each layer the length of its weight gradient's sums, and errors of each kind of
    sums: the excess length along the float32 gradient, <g - f, f> / <f, f>, and the relative
    error."""
    batch = 100
    (x, y), _ = globals()[study]()
    grown = {}
    for sums in SUMS:
        mx.random.seed(seed)
        np.random.seed(seed)
        net = network(study, sums)
        net(nd.array(x[:1]))
        if study == "cifar10":
            take_trained_values(net)
        lengths = _lengths(net, (batch, *x.shape[1:]))
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(nd.array(x[:batch])),
                                                        nd.array(y[:batch]))
        autograd.backward(loss, nd.ones(batch) * 256)
        grown[sums] = [(p.name, lengths[p.name],
                        p.grad().asnumpy().astype("float64"))
                       for p in net.collect_params().values() if p.name in lengths]
    rows = []
    for i, (name, length, f) in enumerate(grown["float32"]):
        row = {"layer": name, "length": length}
        for sums in SUMS:
            g = grown[sums][i][2]
            row[sums] = [float(((g - f) * f).sum() / (f * f).sum()),
                         float(np.linalg.norm(g - f) / np.linalg.norm(f))]
        rows.append(row)
    return rows


def _lengths(net, shape):
    """Returns the length of each convolution's weight gradient sums, by the weight's name."""
    inner = net(mx.sym.var("data")).get_internals()
    _, shapes, _ = inner.infer_shape(data=shape)
    outputs = dict(zip(inner.list_outputs(), shapes))
    return {f"{name[:-len('_fwd_output')]}_weight": shape[0] * shape[2] * shape[3]
            for name, shape in outputs.items() if "conv" in name and name.endswith("_fwd_output")}


# ---- tables

MARGIN = 0.5  # points of accuracy


def print_tables():
    for study in STUDIES:
        runs = {(r["sums"], r["seed"]): r["accuracy"][-1] for r in shared.lines(RUNS)
                if r["study"] == study}
        seeds = [seed for seed in range(STUDIES[study][4])
                 if all((sums, seed) in runs for sums in SUMS)]
        if len(seeds) > 1:
            print(f"\n{study}: {len(seeds)} seeds\n")
            print("| sums | test accuracy: mean ± deviation | minus float32 sums (95 %) | |\n"
                  "| --- | --- | --- | --- |")
            float32 = [runs["float32", seed] for seed in seeds]
            for sums in SUMS:
                mine = [runs[sums, seed] for seed in seeds]
                cells = [sums, f"{np.mean(mine):.2f} ± {np.std(mine, ddof=1):.2f}", "", ""]
                if sums != "float32":
                    found = paired(mine, float32)
                    low, high = found.interval()
                    cells[2:] = (f"{found.mean:+.2f} ({low:+.2f} to {high:+.2f})",
                                 conclusion(found, MARGIN))
                print(f"| {' | '.join(cells)} |")
        rows = [row for row in shared.lines(GRADIENTS) if row["study"] == study]
        lengths = sorted({row["length"] for row in rows}, reverse=True)
        if rows:
            print(f"\n{study}: gradients of weights, one chain less pieces of "
                  f"{STUDIES[study][3]:,}\n")
            print("| products in a sum | layers | V100 | A100 |\n| --- | --- | --- | --- |")
        for length in lengths:
            some = [row for row in rows if row["length"] == length]
            shown = [f"{1e6 * np.mean([too_long(row, gpu) for row in some]):+.0f} ± "
                     f"{1e6 * np.std([too_long(row, gpu) for row in some]):.0f}"
                     for gpu in ("V100", "A100")]
            print(f"| {length:,} | {len(some)} | {shown[0]} | {shown[1]} |")


def too_long(row, gpu):
    """Returns the relative excess length of a gradient in one chain over that in pieces. In
    ResNet-20 both have the same forward pass and data gradients, with sums shorter than a piece."""
    return row[gpu][0] - row[f"{gpu} in pieces"][0]


# ---- completed and remaining runs

def one(study, sums, seed):
    """Executes a run, or with seed -1 the gradients, in a new process."""
    if seed < 0:
        shared.add(GRADIENTS, *({"study": study, **row} for row in weight_gradients(study, 0)))
    else:
        shared.add(RUNS, {"study": study, "sums": sums, "seed": seed, **train(study, sums, seed)})


def main():
    parser = shared.parser(__doc__, STUDIES)
    parser.add_argument("--one", nargs=3, metavar=("STUDY", "SUMS", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args.one[0], args.one[1], int(args.one[2]))
    for study in shared.chosen(args, STUDIES):
        for _ in shared.left(GRADIENTS, [{"study": study}]):
            alone(study, "all", -1)
        for line in shared.left(RUNS, [{"study": study, "sums": sums, "seed": seed}
                                       for seed in range(STUDIES[study][4]) for sums in SUMS]):
            alone(**line)
    print_tables()
    return None


def alone(study, sums, seed):
    """Starts a process for a run."""
    subprocess.run([*shared.PYTHON, __file__, "--one", study, sums, str(seed)], check=True)


if __name__ == "__main__":
    main()
