"""Runs a learning rate range test on a network and a dataset, and plots the loss.

    python lr_find.py --dataset digits --dtype float16 --plot rates.png
    python lr_find.py --dataset cifar10 --model cifar_resnet20_v1 --gpus 0

The flags are those of image_classification.py: only the script's name in a command changes. Flags
of the learning rate, epochs, logs and output files have no effect.
"""
import gluon_amp as amp
import image_classification
import images
import recipes
from matplotlib.figure import Figure


def main(arguments=None):
    parser = recipes.Parser(__doc__)
    recipes.add_flags(parser, "learning rates", (
        ("--plot", str, "rates.png", "output file, PNG or SVG"),
        ("--start", recipes.positive_float, 1e-5, "first learning rate"),
        ("--end", recipes.positive_float, 10.0, "last learning rate"),
        ("--steps", recipes.positive_int, 100, "number of learning rates")))
    image_classification.add_flags(parser)
    image_classification.add_network_flags(parser)
    args = parser.parse_args(arguments)
    for name in ("teacher", "resume", "resume_params", "resume_states", "resume_epoch"):
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')}: the sweep starts with a new network, or "
                         "--use-pretrained, and trains on labels alone")
    if len(args.gpus) > 1 and args.kvstore != "horovod":
        parser.error("--gpus: this script uses one GPU")
    workers = recipes.Workers(args)
    device, = workers.devices
    recipes.seed_all(args.seed)

    _, loader, _ = images.image_loaders(args, workers)
    net = image_classification.converted(args, image_classification.network(args, [device]))
    net(next(iter(loader))[0].as_in_context(device))  # initializes deferred shapes
    trainer = image_classification.trainer_of(args, net, workers.store)
    loss_fn = image_classification.loss_of(args)
    batches = Batches(args, loader, device)
    if args.xray and workers.rank == 0:
        recipes.xray_epoch(args, 0, net, batches, loss_fn)
    sweep = amp.lr_find(net, trainer, loss_fn, batches, args.start, args.end, args.steps)
    if workers.rank:
        return
    if not sweep.rates:
        print("no rate has a finite loss")
        return
    draw(sweep, args.plot)
    print(f"{len(sweep.rates)} rates from {sweep.rates[0]:g} to {sweep.rates[-1]:g}: {args.plot}")
    print("proposed: " + ("none, the loss did not fall" if sweep.suggestion is None
                          else f"{sweep.suggestion:.2g}"))


def draw(sweep, path):
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    axes.plot(sweep.rates, sweep.losses)
    if sweep.suggestion is not None:
        axes.axvline(sweep.suggestion, linestyle="--", label=f"{sweep.suggestion:.2g}")
        axes.legend()
    first, highest = sweep.losses[0], max(sweep.losses)
    axes.set(xscale="log", xlabel="learning rate", ylabel="smoothed loss",
             ylim=(None, min(highest, first + abs(first))))
    figure.savefig(path)


class Batches:
    """Yields the batches of image_classification.py's first epoch, on the device."""

    def __init__(self, args, loader, device):
        self.args, self.loader, self.device = args, loader, device

    def __iter__(self):
        for data, label in self.loader:
            images.check_labels(self.args, label)
            if self.args.mixup:
                data, label = image_classification.mixup(self.args, data, label)
            yield data.as_in_context(self.device), label.as_in_context(self.device)


if __name__ == "__main__":
    recipes.run(main)
