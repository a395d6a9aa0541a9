"""Fine-tunes a pretrained image classifier with Gluon, in float32 or float16.

    python fine_tune.py --pretrained resnet50_v1 --dataset FOLDER --val FOLDER --classes 10 \\
        --dtype float16 --rgb-mean 123.7,116.3,103.5 --rgb-std 58.4,57.1,57.4
    python fine_tune.py --pretrained cifar_resnet20_v1 --pretrained-params FILE.params ...
    python fine_tune.py --pretrained-symbol NET-symbol.json --pretrained-params NET-0000.params ...

The order matters: load, put the features into a new network, initialize the new head, convert to
float16, create the Trainer. For a network of your own change `pretrained_features`, for other data
`image_loaders` in images.py. The script also takes the flags of image_classification.py, except
those that select a network.
"""
import logging
import warnings

import command_line as cli
import gluon_amp as amp  # before mxnet
import images
import mxnet as mx
from image_classification import add_flags, convert, make_loss, prepare, train
from model_zoo import zoo_network
from mxnet import gluon
from mxnet.gluon import nn
from symbolic_fine_tune import first_layers, layer_of, without_head


def add_network_flags(parser):
    """Adds the flags that select and change a network."""
    flag = parser.add_argument_group("pretrained network").add_argument
    flag("--pretrained", help="a network of MXNet's or gluoncv's model zoo")
    flag("--pretrained-params", help="the file of its parameters")
    flag("--pretrained-symbol", help="the -symbol.json of an exported network")
    flag("--layer-before-fullc", help="the layer whose output the new head takes, with "
         "--pretrained-symbol (default: the input of the last fully connected layer)")
    flag("--freeze", type=cli.non_negative_int, default=0,
         help="number of layers to freeze, counted from the input")
    flag("--head-lr-mult", type=cli.non_negative_float, default=1.0,
         help="multiplier of --lr for the new head")
    flag("--bn-momentum", type=cli.fraction, help="momentum of batch norms' moving averages")


# ---- network

class Network(nn.HybridBlock):
    """A network of pretrained features and a new head, with a name scope of its own."""

    def __init__(self, features, classes):
        super().__init__()
        with self.name_scope():
            self.output = nn.Dense(classes)
        self.features = features

    def hybrid_forward(self, F, x):
        return self.output(self.features(x))


def make_network(args, devices):
    """Returns the pretrained features, of which the first layers are frozen, with a new head."""
    features = pretrained_features(args, devices)
    freeze(features, args.freeze)
    net = Network(features, images.number_of_classes(args))
    net.output.initialize(mx.init.Xavier(), ctx=devices)
    net.output.collect_params().setattr("lr_mult", args.head_lr_mult)
    return net


def pretrained_features(args, devices):
    """Returns the pretrained network up to its head, from the model zoo or from files."""
    if args.pretrained_symbol:
        return exported_features(args, devices)
    net = zoo_network_of(args, devices)
    if not hasattr(net, "features"):
        raise ValueError(f"{args.pretrained} has no attribute features: export it, and pass "
                         "--pretrained-symbol and --pretrained-params")
    if args.bn_momentum is not None:
        set_momentum(net.features, args.bn_momentum)
    return net.features


def exported_features(args, devices):
    """Returns the features of a network that `net.export` or a Module saved."""
    symbol = without_head(mx.sym.load(args.pretrained_symbol), args.layer_before_fullc,
                          args.bn_momentum, args.freeze)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Cannot decide type")  # of the data: float32 is right
        features = gluon.SymbolBlock(symbol, mx.sym.var("data"))
    features.collect_params().load(args.pretrained_params, devices, ignore_extra=True,
                                   cast_dtype=True)
    return features


def zoo_network_of(args, devices):
    """Returns a network of the model zoo, with its parameters or those of a file."""
    if args.pretrained_params:
        return zoo_network_with_parameters(args.pretrained, args.pretrained_params, devices)
    try:
        return zoo_network(args.pretrained, pretrained=True, ctx=devices)
    except OSError as error:
        raise ValueError(f"{error}: --pretrained-params names a file") from None


def zoo_network_with_parameters(name, path, devices):
    """Returns a network of the model zoo with the parameters of a file; they may be float16."""
    try:
        arrays = mx.nd.load(path)
    except mx.MXNetError as error:
        raise ValueError(f"{path} is not a file of parameters: {cli.first_line(error)}") from None
    if not isinstance(arrays, dict):
        raise ValueError(f"{path} has arrays without names")
    classes = [array.shape[0] for array_name, array in arrays.items()
               if array_name.endswith("weight") and array.ndim == 2]
    if not classes:
        raise ValueError(f"{path} has no weight of a fully connected layer, which has the number "
                         "of classes of the network")
    net = zoo_network(name, classes=classes[-1])
    exported = any(array_name.startswith("arg:") for array_name in arrays)
    load = net.collect_params().load if exported else net.load_parameters
    load(path, devices, cast_dtype=True)
    return net


def set_momentum(features, momentum):
    """Sets the momentum of all batch norms: the default is too slow for a short training."""
    def set_momentum_of(block):
        if isinstance(block, nn.BatchNorm):
            block._kwargs["momentum"] = momentum
    features.apply(set_momentum_of)


def freeze(features, count):
    """Freezes the first layers that have parameters, with their batch norms' averages."""
    names = first_layers(features.collect_params(), count)
    if isinstance(features, gluon.SymbolBlock):  # `without_head` has frozen its batch norms
        for name, parameter in features.collect_params().items():
            if layer_of(name) in names:
                parameter.grad_req = "null"
        return

    def freeze_block(block):
        if block.prefix[:-1] in names:
            amp.freeze(block)
    features.apply(freeze_block)


# ---- training

def main(arguments=None):
    """Fine-tunes with the flags."""
    parser = cli.Parser(__doc__)
    add_network_flags(parser)
    add_flags(parser, save_dir="runs/fine_tune")
    parser.set_defaults(lr=0.01, epochs=3, batch_size=32)
    args = parser.parse_args(arguments)
    if not args.pretrained and not (args.pretrained_symbol and args.pretrained_params):
        parser.error("pass a network: --pretrained NAME, or --pretrained-symbol NET-symbol.json "
                     "--pretrained-params NET-0000.params")

    workers, loaders = prepare(args)
    devices, val_loader = workers.devices, loaders[-1]

    # Convert before the Trainer is created, which keeps float32 copies of 16-bit weights: updates
    # are often too small for float16
    net = convert(args, make_network(args, devices))
    net(next(iter(val_loader))[0][:1].as_in_context(devices[0]))  # allocates the head's parameters
    top1_error, top5_error, _ = images.validate(net, val_loader, devices, make_loss(args))
    logging.info("before: err-top1=%f err-top5=%f", top1_error, top5_error)

    # The loop of image_classification.py: step, validation, checkpoint
    train(args, workers, loaders, net)


if __name__ == "__main__":
    cli.run(main)
