"""Fine-tunes a pretrained network with Gluon, in float32 or float16.

    python fine_tune.py --pretrained resnet50_v1 --dataset FOLDER --val FOLDER --classes 10 \\
        --dtype float16 --rgb-mean 123.7,116.3,103.5 --rgb-std 58.4,57.1,57.4
    python fine_tune.py --pretrained cifar_resnet20_v1 --pretrained-params FILE.params ...
    python fine_tune.py --pretrained-symbol NET-symbol.json --pretrained-params NET-0000.params ...

The order matters: load, put the features into a new network, initialize the new head, convert to
float16, create the Trainer. The script also takes the flags of image_classification.py.
"""
import os
import warnings

import gluon_amp as amp
import image_classification
import images
import mxnet as mx
import recipes
from mxnet import gluon
from mxnet.gluon import nn
from symbolic_fine_tune import first_layers, without_head


def pretrained_features(args, device):
    """Returns the loaded features of the pretrained network; float16 files are valid, too."""
    path = args.pretrained_params
    if path and not os.path.exists(path):
        raise SystemExit(f"{path} does not exist")
    if args.pretrained_symbol:
        symbol = without_head(mx.sym.load(args.pretrained_symbol), args.layer_before_fullc,
                              args.bn_momentum, args.freeze)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Cannot decide type")  # of the data: float32 is right
            features = gluon.SymbolBlock(symbol, mx.sym.var("data"))
        features.collect_params().load(path, device, ignore_extra=True, cast_dtype=True)
        return features
    if not path:
        try:
            net = images.zoo_network(args.pretrained, pretrained=True, ctx=device)
        except OSError as error:
            raise SystemExit(f"{error}: --pretrained-params names a file") from None
    else:
        saved = parameters_of(path)
        classes = [v.shape[0] for n, v in saved.items() if n.endswith("weight") and v.ndim == 2]
        if not classes:
            raise SystemExit(f"{path} has no weight of a fully connected layer, which has "
                             "the number of classes of the network")
        net = images.zoo_network(args.pretrained, classes=classes[-1])
        if any(name.startswith("arg:") for name in saved):  # of an exported network
            net.collect_params().load(path, device, cast_dtype=True)
        else:
            net.load_parameters(path, device, cast_dtype=True)
    if not hasattr(net, "features"):
        raise SystemExit(f"{args.pretrained} has no attribute features: export it, and pass "
                         "--pretrained-symbol and --pretrained-params")
    if args.bn_momentum is not None:
        set_momentum(net.features, args.bn_momentum)
    return net.features


def parameters_of(path):
    """Returns the named arrays of a file of parameters."""
    try:
        saved = mx.nd.load(path)
    except mx.MXNetError as error:
        raise SystemExit(f"{path} is not a file of parameters: {recipes.first_line(error)}") \
            from None
    if not isinstance(saved, dict):
        raise SystemExit(f"{path} has arrays without names")
    return saved


class Network(nn.HybridBlock):
    """A network of pretrained features and a new head."""

    def __init__(self, features, classes, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.output = nn.Dense(classes)
        self.features = features

    def hybrid_forward(self, F, x):
        return self.output(self.features(x))


def set_momentum(features, momentum):
    """Sets the momentum of all batch norms: the default is too slow for a short training."""
    def one(block):
        if isinstance(block, nn.BatchNorm):
            block._kwargs["momentum"] = momentum
    features.apply(one)


def freeze(features, layers):
    """Freezes the first `layers` layers that have parameters, with their batch norms' averages."""
    names = first_layers(features.collect_params(), layers)
    if isinstance(features, gluon.SymbolBlock):  # without_head has set its batch norms
        for name, parameter in features.collect_params().items():
            if name.rsplit("_", 1)[0] in names:
                parameter.grad_req = "null"
        return

    def one(block):
        if block.prefix[:-1] in names:
            amp.freeze(block)
    features.apply(one)


def network(args, devices):
    """Returns the pretrained features with a new head, whose shapes are deferred."""
    features = pretrained_features(args, devices)
    freeze(features, args.freeze)
    net = Network(features, images.classes_of(args))
    net.output.initialize(mx.init.Xavier(), ctx=devices)
    net.output.collect_params().setattr("lr_mult", args.head_lr_mult)
    return net


def main(arguments=None):
    parser = recipes.Parser(__doc__)
    recipes.add_flags(parser, "pretrained network", (
        ("--pretrained", str, None, "a network of MXNet's or gluoncv's model zoo"),
        ("--pretrained-params", str, None, "the file of its parameters"),
        ("--pretrained-symbol", str, None, "the -symbol.json of an exported network"),
        ("--layer-before-fullc", str, None, "the layer whose output the new head takes, with "
         "--pretrained-symbol (default: the input of the last fully connected layer)"),
        ("--freeze", recipes.non_negative_int, 0,
         "number of layers to freeze, counted from the input"),
        ("--head-lr-mult", recipes.non_negative_float, 1.0, "multiplier of --lr for the new head"),
        ("--bn-momentum", recipes.fraction, None, "momentum of batch norms' moving averages")))
    image_classification.add_flags(parser, folder="runs/fine_tune")
    parser.set_defaults(lr=0.01, epochs=3, batch_size=32)
    args = parser.parse_args(arguments)
    if not args.pretrained and not (args.pretrained_symbol and args.pretrained_params):
        parser.error("pass a network: --pretrained NAME, or --pretrained-symbol NET-symbol.json "
                     "--pretrained-params NET-0000.params")
    return image_classification.train(args, network, validates_first=True)


if __name__ == "__main__":
    recipes.run(main)
