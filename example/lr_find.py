"""Runs a learning rate range test on a network and a dataset, and plots the loss.

    python lr_find.py --dataset digits --dtype float16 --plot rates.png
    python lr_find.py --dataset cifar10 --model cifar_resnet20_v1 --gpus 0

The flags are those of image_classification.py: only the script's name in a command changes. Flags
of the learning rate, epochs, logs and output files have no effect.
"""
import gluon_amp as amp
import image_classification as recipe
import images
import recipes
from matplotlib.figure import Figure


def main(arguments=None):
    parser = recipes.Parser(__doc__)
    recipes.add_flags(parser, "learning rates", (
        ("--plot", str, "rates.png", "output file, PNG or SVG"),
        ("--start", recipes.above_0, 1e-5, "first learning rate"),
        ("--end", recipes.above_0, 10.0, "last learning rate"),
        ("--steps", recipes.positive, 100, "number of learning rates")))
    recipe.add_flags(parser)
    recipe.add_network_flags(parser)
    args = parser.parse_args(arguments)
    for name in ("teacher", "resume", "resume_params", "resume_states", "resume_epoch"):
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')}: the sweep starts with a new network, or "
                         "--use-pretrained, and trains on labels alone")
    if len(args.gpus) > 1 and args.kvstore != "horovod":
        parser.error("--gpus: one is enough")
    workers = recipes.Workers(args)
    device, = workers.devices
    recipes.seed_all(args.seed)

    _, loader, _ = images.image_loaders(args, workers)
    net = recipe.converted(args, recipe.network(args, [device]))
    net(next(iter(loader))[0].as_in_context(device))  # initializes deferred shapes
    trainer, loss_fn = recipe.trainer_of(args, net, workers.store), recipe.loss_of(args)
    batches = Batches(args, loader, device)
    if args.xray and workers.rank == 0:
        recipes.xray_epoch(args, 0, net, batches, loss_fn)
    found = amp.lr_find(net, trainer, loss_fn, batches, args.start, args.end, args.steps)
    if workers.rank:
        return
    if not found.rates:
        print("no rate has a finite loss")
        return
    draw(found, args.plot)
    print(f"{len(found.rates)} rates from {found.rates[0]:g} to {found.rates[-1]:g}: {args.plot}")
    print("proposed: " + ("none, the loss did not fall" if found.suggestion is None
                          else f"{found.suggestion:.2g}"))


def draw(found, path):
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    axes.plot(found.rates, found.losses)
    if found.suggestion is not None:
        axes.axvline(found.suggestion, linestyle="--", label=f"{found.suggestion:.2g}")
        axes.legend()
    first, highest = found.losses[0], max(found.losses)
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
                data, label = recipe.mixed(self.args, data, label)
            yield data.as_in_context(self.device), label.as_in_context(self.device)


if __name__ == "__main__":
    recipes.run(main)
