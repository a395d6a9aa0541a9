"""Which learning rate? Sweeps it over one network and dataset, and draws the loss.

    python lr_find.py --dataset digits --dtype float16 --plot rates.png
    python lr_find.py --dataset cifar10 --model cifar_resnet20_v1 --gpus 0

Takes the flags of image_classification.py.
"""
import argparse

import command
import gluon_amp as amp
import image_classification as recipe
import mxnet as mx
from gluon_data import datasets
from mxnet import gluon


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=command.Help)
    parser.add_argument("--plot", default="rates.png", help="a PNG or SVG file")
    parser.add_argument("--start", type=float, default=1e-5)
    parser.add_argument("--end", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=100)
    mine, rest = parser.parse_known_args(arguments)
    args = recipe.parse(rest)
    device = recipe.devices_of(args)[0]
    mx.random.seed(args.seed)

    data, _ = datasets(args)
    loader = gluon.data.DataLoader(data, args.batch_size, shuffle=True, last_batch="discard",
                                   num_workers=args.num_workers)
    net = recipe.network(args)
    net.initialize(mx.init.MSRAPrelu(), ctx=device)
    amp.convert(net, args.policy or args.dtype)
    net.hybridize(static_alloc=True, static_shape=True)
    net(next(iter(loader))[0].as_in_context(device))  # shapes of all parameters
    trainer, loss_fn = recipe.trainer_of(args, net), recipe.loss_of(args)
    found = amp.lr_find(net, trainer, lambda out, y: loss_fn(out, y.as_in_context(device)),
                        _OnDevice(loader, device), mine.start, mine.end, mine.steps, mine.plot)
    print(f"{len(found.rates)} rates from {found.rates[0]:g} to {found.rates[-1]:g}: {mine.plot}")
    print("proposed: " + ("none, the loss did not fall" if found.suggestion is None
                          else f"{found.suggestion:.2g}"))


class _OnDevice:
    def __init__(self, loader, device):
        self.loader, self.device = loader, device

    def __iter__(self):
        for data, label in self.loader:
            yield data.as_in_context(self.device), label


if __name__ == "__main__":
    command.run(main)
