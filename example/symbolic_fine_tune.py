"""Fine-tunes a pretrained network with the Symbolic API, in float32 or float16.

    python symbolic_fine_tune.py --pretrained-model my_network,90 --dtype float16 \\
        --num-classes 10 --image-shape 3,112,112 --rgb-mean 127,127,127 --rgb-std 128,128,128 \\
        --bn-momentum 0.8 --data-train train.rec --data-val test.rec

reads my_network-symbol.json and my_network-0090.params. A new head replaces the old one, from the
last fully connected layer to the output. In a short training batch norm's moving averages need a
lower momentum: --bn-momentum 0.8.
"""
import difflib
import json
import os
import re

import gluon_amp as amp
import images
import mxnet as mx
import recipes
import train_imagenet


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
    features = without_head(symbol, before, bn_momentum)
    head = mx.sym.FullyConnected(features, num_hidden=num_classes, name="new_fc")
    return features, mx.sym.SoftmaxOutput(head, name="softmax")


# ---- the network without its head

def first_layers(parameters, count):
    """Returns the names of the first layers of parameters in the order of a network."""
    return list(dict.fromkeys(name.rsplit("_", 1)[0] for name in parameters))[:count]


def without_head(symbol, layer=None, bn_momentum=None, freeze=0):
    """Returns a classifier's features: its symbol up to its last fully connected layer.

    Args:
        layer: the last layer of the features instead.
        bn_momentum: the momentum of all batch norms; a short training needs a lower one.
        freeze: the number of layers, from the first, whose batch norms use their moving averages
            and do not change them.
    """
    graph = json.loads(symbol.tojson(remove_amp_cast=False))
    nodes = graph["nodes"]
    frozen = first_layers([n for n in symbol.list_arguments() if n != "data"], freeze)
    for node in nodes:
        if "BatchNorm" in node["op"]:
            attributes = node.setdefault("attrs", {})
            if bn_momentum is not None:
                attributes["momentum"] = str(bn_momentum)
            gamma = nodes[node["inputs"][1][0]]["name"]
            if gamma.rsplit("_", 1)[0] in frozen:
                attributes["use_global_stats"] = "True"
    internals = mx.sym.load_json(json.dumps(graph)).get_internals()
    name = layer or _head(nodes, graph["heads"][0][0])
    layers = [one[:-len("_output")] for one in internals.list_outputs() if one.endswith("_output")]
    if name not in layers:
        name = re.sub("_output$", "", name)
    if name not in layers:
        similar = difflib.get_close_matches(name, layers, 5, 0.3) or layers[:5]
        raise ValueError(f"--layer-before-fullc: there is no layer {name}. Similar: "
                         f"{', '.join(similar)}")
    features = internals[f"{name}_output"]
    features = features if layer else features.get_children()[0]
    if "data" not in features.list_arguments():
        raise ValueError("the network has no argument named data. Its first arguments: "
                         f"{', '.join(features.list_arguments()[:3])}")
    return features


def _head(nodes, i):
    """Returns the name of the last fully connected layer before node i."""
    while nodes[i]["op"] != "FullyConnected":
        if not nodes[i]["inputs"]:
            layers = [node["name"] for node in nodes if node["op"] != "null"]
            raise ValueError("the network has no FullyConnected layer before its output. Pass "
                             "--layer-before-fullc, such as one of "
                             f"{', '.join(layers[-5:])}")
        i = nodes[i]["inputs"][0][0]
    return nodes[i]["name"]


# ---- training

def main(arguments=None):
    parser = recipes.Parser(__doc__)
    recipes.add_flags(parser, "pretrained network", (
        ("--pretrained-model", str, None, "a checkpoint, or a network of the model zoo",
         {"required": True, "metavar": "PREFIX[,EPOCH]"}),
        ("--layer-before-fullc", str, None, "the layer before the head (default: detected)"),
        ("--freeze", int, 0, "1: train the new head only", {"choices": (0, 1)}),
        ("--bn-momentum", recipes.fraction, None, "momentum of all batch norms")))
    train_imagenet.add_arguments(parser)
    parser.set_defaults(epochs=3, lr=0.01, lr_decay_epoch=[2], batch_size=32)
    args = train_imagenet.parse_flags(parser, arguments)

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
    train_imagenet.fit(args, symbol, {n: v for n, v in arg_params.items() if n in body},
                       {n: aux_params[n] for n in features.list_auxiliary_states()},
                       sorted(body) if args.freeze else None)


if __name__ == "__main__":
    recipes.run(main)
