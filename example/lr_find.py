"""Runs a learning rate range test on a network and a dataset, and plots the loss.

    python lr_find.py --dataset digits --dtype float16 --plot rates.png
    python lr_find.py --dataset cifar10 --model cifar_resnet20_v1 --gpus 0

The test takes one step at each learning rate, from --start to --end, and proposes the rate at which
the loss falls fastest. The flags are those of image_classification.py: only the script's name in a
command changes. Flags of the learning rate, epochs, logs and output files have no effect.
"""
import command_line as cli
import gluon_amp as amp  # before mxnet
import images
import recipes
from image_classification import (
    add_flags,
    add_network_flags,
    convert,
    make_loss,
    make_network,
    make_trainer,
    mixup,
)
from matplotlib.figure import Figure


class Batches:
    """The batches of a loader, on the device. Each iteration starts again."""

    def __init__(self, args, loader, device):
        self.args, self.loader, self.device = args, loader, device

    def __iter__(self):
        for data, label in self.loader:
            if self.args.mixup:
                data, label = mixup(self.args, data, label)
            yield data.as_in_context(self.device), label.as_in_context(self.device)


def parse_flags(arguments):
    """Returns the flags. Refuses those that would change what is measured."""
    parser = cli.Parser(__doc__)
    flag = parser.add_argument_group("learning rates").add_argument
    flag("--plot", default="rates.png", help="output file, PNG or SVG")
    flag("--start", type=cli.positive_float, default=1e-5, help="first learning rate")
    flag("--end", type=cli.positive_float, default=10.0, help="last learning rate")
    flag("--steps", type=cli.positive_int, default=100, help="number of learning rates")
    add_network_flags(parser)
    add_flags(parser)
    args = parser.parse_args(arguments)
    for name in ("teacher", "resume", "resume_params", "resume_states", "resume_epoch"):
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')}: the sweep starts with a new network, or "
                         "--use-pretrained, and trains on labels alone")
    if len(args.gpus) > 1 and args.kvstore != "horovod":
        parser.error("--gpus: this script uses one GPU")
    return args


def main(arguments=None):
    """Runs the test with the flags, and prints the proposed rate."""
    args = parse_flags(arguments)
    workers = recipes.Workers(args)
    recipes.log_to_stderr(workers.rank)
    device, = workers.devices
    recipes.seed_all(args.seed)

    # The training of image_classification.py, before its first step
    _, loader, _ = images.image_loaders(args, workers)
    net = convert(args, make_network(args, [device]))  # before the Trainer is created
    net(next(iter(loader))[0].as_in_context(device))  # allocates all parameters
    trainer, loss_fn = make_trainer(args, net, workers.store), make_loss(args)
    batches = Batches(args, loader, device)
    if args.xray and workers.rank == 0:
        recipes.xray_epoch(args, 0, net, batches, loss_fn)

    # lr_find restores the network, the Trainer and its loss scale at the end
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
    """Draws the loss by learning rate, and a line at the proposed rate."""
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    axes.plot(sweep.rates, sweep.losses)
    if sweep.suggestion is not None:
        axes.axvline(sweep.suggestion, linestyle="--", label=f"{sweep.suggestion:.2g}")
        axes.legend()
    first, highest = sweep.losses[0], max(sweep.losses)
    axes.set(xscale="log", xlabel="learning rate", ylabel="smoothed loss",
             ylim=(None, min(highest, first + abs(first))))  # not the losses that diverge
    figure.savefig(path)


if __name__ == "__main__":
    cli.run(main)
