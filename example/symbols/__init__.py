"""The networks, by their names in train_imagenet.py's --network."""
import inspect
from importlib import import_module

# The file of each network, and keyword arguments of its get_symbol.
NETWORKS = {
    "alexnet": ("alexnet", {}),
    "googlenet": ("inception", {"version": "googlenet"}),
    "inception-bn": ("inception", {"version": "bn"}),
    "inception-v3": ("inception", {"version": "v3"}),
    "mobilenet": ("mobilenet", {}),
    "mobilenetv2": ("mobilenetv2", {}),
    "resnet": ("resnet", {"version": 1}),
    "resnet-v1": ("resnet", {"version": 1}),
    "resnet-v2": ("resnet", {"version": 2}),
    "resnext": ("resnext", {}),
    "squeezenet1.0": ("squeezenet", {"version": "1.0"}),
    "squeezenet1.1": ("squeezenet", {"version": "1.1"}),
    "vgg": ("vgg", {}),
}


def add_flags(parser):
    """Adds the flags that select a network."""
    flag = parser.add_argument_group("network").add_argument
    flag("--network", choices=tuple(NETWORKS), default="resnet", metavar="NAME",
         help=f"{', '.join(NETWORKS)}; resnet: resnet-v1")
    flag("--num-layers", type=int, help="depth of a resnet, resnext (default: 50) or vgg (16)")
    flag("--multiplier", type=float, help="width of a mobilenet or mobilenetv2 (default: 1)")
    flag("--batch-norm", action="store_true", default=None, help="a vgg with batch norms")
    flag("--num-group", type=int, help="groups of a resnext's 3x3 convolutions (default: 32)")


def network_of(args):
    """Returns the network of the flags."""
    return get_symbol(args.network, args.num_classes, ",".join(map(str, args.image_shape)),
                      args.dtype, num_layers=args.num_layers, multiplier=args.multiplier,
                      batch_norm=args.batch_norm, num_group=args.num_group)


def get_symbol(network, num_classes, image_shape, dtype, **flags):
    """Returns the network of a name, with its SoftmaxOutput.

    Args:
        image_shape: such as "3,224,224".
        flags: num_layers, multiplier and so on, if the network has them; None: its default.
    """
    file, fixed = NETWORKS[network]
    function = import_module(f"{__name__}.{file}").get_symbol
    accepted = set(inspect.signature(function).parameters) - set(fixed)
    options = {name: value for name, value in flags.items() if value is not None}
    for name in options:
        if name not in accepted:
            valid = [f"--{flag}".replace("_", "-") for flag in flags if flag in accepted]
            raise ValueError(f"{network} has no --{name.replace('_', '-')}. "
                             f"Valid: {', '.join(valid) or 'none'}")
    if "image_shape" in accepted:
        options["image_shape"] = image_shape
    return function(num_classes, dtype=dtype, **fixed, **options)
