"""Which learning rate? Sweeps it over one network and dataset, and draws the loss.

    python lr_find.py --dataset digits --dtype float16 --plot rates.png
    python lr_find.py --dataset cifar10 --model cifar_resnet20_v1 --gpus 0

Takes the flags of image_classification.py, so that a command is tried under this script's name.
Those of the rate, of epochs, of log lines and of files of a run have nothing to do here.
"""
import random

import gluon_amp as amp
import image_classification as recipe
import mxnet as mx
import recipes


def main(arguments=None):
    parser = recipes.Parser(__doc__)
    add = parser.add_argument_group("learning rates").add_argument
    add("--plot", default="rates.png", help="a PNG or SVG file")
    add("--start", type=recipes.above_0, default=1e-5, help="the first rate")
    add("--end", type=recipes.above_0, default=10.0, help="the last one")
    add("--steps", type=recipes.positive, default=100, help="how many rates")
    recipe.add_arguments(parser)
    recipe.add_network_arguments(parser)
    args = parser.parse_args(arguments)
    for name in ("teacher", "resume", "resume_params", "resume_states", "resume_epoch"):
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')}: the sweep begins with a new network, or "
                         "--use-pretrained, and learns from labels alone")
    if len(args.gpus) > 1 and args.kvstore != "horovod":
        parser.error("--gpus: one is enough")
    ranks = recipes.Ranks(args.kvstore)
    device, = recipes.devices_of(ranks.devices(args.gpus))
    mx.random.seed(args.seed)
    random.seed(args.seed)

    _, loader, _ = recipes.image_loaders(args, ranks)
    net = recipe.network(args, [device])
    recipe.converted(args, net)
    net(next(iter(loader))[0].as_in_context(device))  # shapes of all parameters
    trainer, loss_fn = recipe.trainer_of(args, net, ranks.store), recipe.loss_of(args)
    batches = Batches(args, ranks, loader, device)
    if ranks.rank == 0:
        recipes.xray_epoch(args, 0, net, batches, loss_fn)
    found = amp.lr_find(net, trainer, loss_fn, batches, args.start, args.end, args.steps,
                        None if ranks.rank else args.plot)
    if ranks.rank:
        return
    print(f"{len(found.rates)} rates from {found.rates[0]:g} to {found.rates[-1]:g}: {args.plot}")
    print("proposed: " + ("none, the loss did not fall" if found.suggestion is None
                          else f"{found.suggestion:.2g}"))


class Batches:
    """What image_classification.py trains on in its first epoch, on the device."""

    def __init__(self, args, ranks, loader, device):
        self.args, self.ranks, self.loader, self.device = args, ranks, loader, device

    def __iter__(self):
        mix = recipe.mixup_of(self.args, 0, self.ranks.rank)
        for data, label in self.loader:
            recipes.check_labels(self.args, label)
            data, label = mix(data, label) if mix else (data, label)
            yield data.as_in_context(self.device), label.as_in_context(self.device)


if __name__ == "__main__":
    recipes.run(main)
