"""Trains ImageNet, or any images in RecordIO files, with the Symbolic API.

    python train_imagenet.py --gpus 0,1,2,3 --dtype float16 --batch-size 1024 --lr 0.4 \\
        --data-train train.rec --data-val val.rec
    python train_imagenet.py --benchmark 1 --dtype float16 --num-layers 18 --batch-size 8

The flags and the log lines are those of MXNet's own example/image-classification.
"""
import argparse
from importlib import import_module

import command
import gluon_amp  # noqa: F401  (before mxnet: newer numpys then fit it)
import image_data
import module_fit


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=command.Help)
    parser.add_argument("--network", default="resnet", choices=("resnet", "resnet-v2", "mobilenet"))
    parser.add_argument("--num-layers", type=int, default=50, help="of a resnet")
    module_fit.add_arguments(parser)
    image_data.add_arguments(parser)
    args = parser.parse_args(arguments)
    image_data.image_shape(args)
    network, _, version = args.network.partition("-v")
    options = {"num_layers": args.num_layers, "image_shape": args.image_shape,
               "version": int(version or 1)} if network == "resnet" else {}
    try:
        symbol = import_module(f"symbols.{network}").get_symbol(
            args.num_classes, dtype=args.dtype, **options)
    except ValueError as error:
        raise SystemExit(f"{parser.prog}: {error}") from None
    module_fit.fit(args, symbol)


if __name__ == "__main__":
    command.run(main)
