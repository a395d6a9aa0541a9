"""Fine-tunes a pretrained network with the Symbolic API, in float32 or float16.

    python symbolic_fine_tune.py --pretrained-model my_network,90 --dtype float16 \\
        --num-classes 10 --image-shape 3,112,112 --rgb-mean 127,127,127 --rgb-std 128,128,128 \\
        --bn-momentum 0.8 --data-train train.rec --data-val test.rec

reads my_network-symbol.json and my_network-0090.params. A new head replaces the old one, from the
last fully connected layer to the output. In a short training batch norm's moving averages need a
lower momentum: --bn-momentum 0.8.
"""
import os

import gluon_amp as amp
import images
import mxnet as mx
import recipes
import train_imagenet as recipe


def load(name):
    """Returns the symbol and parameters of PREFIX[,EPOCH], or of a model zoo's network."""
    prefix, _, epoch = name.partition(",")
    if os.path.exists(f"{prefix}-symbol.json"):
        params = f"{prefix}-{int(epoch or 0):04d}.params"
        if not os.path.exists(params):
            raise SystemExit(f"{params} does not exist")
        return mx.model.load_checkpoint(prefix, int(epoch or 0))
    try:
        net = images.zoo_network(prefix, pretrained=True)
    except ValueError as error:
        raise SystemExit(f"{prefix}-symbol.json does not exist, and {error}") from None
    values = {name: p.data() for name, p in net.collect_params().items()}
    symbol = net(mx.sym.var("data"))
    auxiliary = symbol.list_auxiliary_states()
    return (symbol, {n: v for n, v in values.items() if n not in auxiliary},
            {n: values[n] for n in auxiliary})


def with_new_head(symbol, num_classes, before=None, bn_momentum=None):
    """Returns the network up to a layer, with a new classifier."""
    features = images.without_head(symbol, before, bn_momentum)
    head = mx.sym.FullyConnected(features, num_hidden=num_classes, name="new_fc")
    return features, mx.sym.SoftmaxOutput(head, name="softmax")


def main(arguments=None):
    parser = recipes.Parser(__doc__)
    add = parser.add_argument_group("pretrained network").add_argument
    add("--pretrained-model", required=True, metavar="PREFIX[,EPOCH]",
        help="a checkpoint, or a network of the model zoo")
    add("--layer-before-fullc", help="the layer before the head (default: detected)")
    add("--freeze", type=int, default=0, choices=(0, 1), help="1: train the new head only")
    add("--bn-momentum", type=recipes.share, help="momentum of all batch norms")
    recipe.add_arguments(parser)
    parser.set_defaults(num_epochs=3, lr=0.01, lr_step_epochs=[2], batch_size=32)
    args = recipe.parse_flags(parser, arguments)

    symbol, arg_params, aux_params = load(args.pretrained_model)
    features, symbol = with_new_head(symbol, args.num_classes, args.layer_before_fullc,
                                     args.bn_momentum)
    body = set(features.list_arguments()) - {"data"}
    missing = sorted((body | set(features.list_auxiliary_states()))
                     - {*arg_params, *aux_params})
    if missing:
        raise SystemExit(f"{args.pretrained_model} lacks parameters: {', '.join(missing[:10])}")
    if args.dtype == "float32" and "float16" in {v.dtype.__name__ for v in arg_params.values()}:
        raise SystemExit(f"{args.pretrained_model} is in float16: --dtype float16")
    symbol = amp.convert_symbol(symbol, args.dtype)
    recipe.fit(args, symbol, {n: v for n, v in arg_params.items() if n in body},
                   {n: aux_params[n] for n in features.list_auxiliary_states()},
                   sorted(body) if args.freeze else None)


if __name__ == "__main__":
    recipes.run(main)
