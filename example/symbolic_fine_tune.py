"""Fine-tunes a pretrained network with the Symbolic API, in float32 or float16.

    python symbolic_fine_tune.py --pretrained-model my_network,90 --dtype float16 \\
        --num-classes 10 --image-shape 3,112,112 --rgb-mean 127,127,127 --rgb-std 128,128,128 \\
        --bn-momentum 0.8 --data-train train.rec --data-val test.rec

reads my_network-symbol.json and my_network-0090.params. A new head replaces the old one, from the
last fully connected layer to the output. In a short training batch norm's moving averages need a
lower momentum: --bn-momentum 0.8.

As in MXNet's fine-tune.py, data and training loop are those of train_imagenet.py.
"""
import difflib
import json
import os
import re

import command_line as cli
import gluon_amp as amp  # before mxnet
import mxnet as mx
import numpy as np
import train_imagenet
from model_zoo import zoo_network

# ---- the network without its head

def layer_of(parameter):
    """Returns the name of a parameter's layer: conv0 for conv0_weight."""
    return parameter.rsplit("_", 1)[0]


def first_layers(parameters, count):
    """Returns the names of the first layers of parameters in the order of a network."""
    return list(dict.fromkeys(map(layer_of, parameters)))[:count]


def without_head(symbol, layer=None, bn_momentum=None, freeze=0):
    """Returns a classifier's features: its symbol up to its last fully connected layer.

    Args:
        layer: the last layer of the features instead.
        bn_momentum: the momentum of all batch norms; a short training needs a lower one.
        freeze: the number of layers, from the first, whose batch norms use their moving averages
            and do not change them.
    """
    # Attributes of a symbol's layers can be changed in its JSON only
    graph = json.loads(symbol.tojson(remove_amp_cast=False))
    nodes = graph["nodes"]
    frozen = first_layers([name for name in symbol.list_arguments() if name != "data"], freeze)
    for node in nodes:
        if "BatchNorm" in node["op"]:
            attributes = node.setdefault("attrs", {})
            if bn_momentum is not None:
                attributes["momentum"] = str(bn_momentum)
            gamma = nodes[node["inputs"][1][0]]["name"]
            if layer_of(gamma) in frozen:
                attributes["use_global_stats"] = "True"
    outputs = mx.sym.load_json(json.dumps(graph)).get_internals()
    if layer:
        features = outputs[f"{existing_layer(layer, outputs)}_output"]
    else:
        head = last_fully_connected(nodes, graph["heads"][0][0])
        features = outputs[f"{head}_output"].get_children()[0]  # the input of the head
    if "data" not in features.list_arguments():
        raise ValueError("the network has no argument named data. Its first arguments: "
                         f"{', '.join(features.list_arguments()[:3])}")
    return features


def existing_layer(name, outputs):
    """Returns the name of a layer, which may be that of its output; refuses an unknown one."""
    layers = [output[:-len("_output")] for output in outputs.list_outputs()
              if output.endswith("_output")]
    for candidate in (name, re.sub("_output$", "", name)):
        if candidate in layers:
            return candidate
    similar = difflib.get_close_matches(name, layers, 5, 0.3) or layers[:5]
    raise ValueError(f"--layer-before-fullc: there is no layer {name}. Similar: "
                     f"{', '.join(similar)}")


def last_fully_connected(nodes, i):
    """Returns the name of the last fully connected layer before node i."""
    while nodes[i]["op"] != "FullyConnected":
        if not nodes[i]["inputs"]:
            layers = [node["name"] for node in nodes if node["op"] != "null"]
            raise ValueError("the network has no FullyConnected layer before its output. Pass "
                             "--layer-before-fullc, such as one of "
                             f"{', '.join(layers[-5:])}")
        i = nodes[i]["inputs"][0][0]
    return nodes[i]["name"]


# ---- fine-tuning

def load(name):
    """Returns the symbol and parameters of PREFIX[,EPOCH], or of a model zoo's network."""
    prefix, _, epoch = name.partition(",")
    if os.path.exists(f"{prefix}-symbol.json"):
        params = f"{prefix}-{int(epoch or 0):04d}.params"
        if not os.path.exists(params):
            raise ValueError(f"{params} does not exist")
        return mx.model.load_checkpoint(prefix, int(epoch or 0))
    try:
        net = zoo_network(prefix, pretrained=True)
    except ValueError as error:
        raise ValueError(f"{prefix}-symbol.json does not exist, and {error}") from None
    symbol = net(mx.sym.var("data"))
    arrays = {name: parameter.data() for name, parameter in net.collect_params().items()}
    aux_params = {name: arrays.pop(name) for name in symbol.list_auxiliary_states()}
    return symbol, arrays, aux_params


def parameters_of(features, arrays, args):
    """Returns the arrays of the features: arguments, which are trained, and moving averages."""
    arguments = [name for name in features.list_arguments() if name != "data"]
    averages = features.list_auxiliary_states()
    missing = sorted({*arguments, *averages} - set(arrays))
    if missing:
        raise ValueError(f"{args.pretrained_model} lacks parameters: {', '.join(missing[:10])}")
    if args.dtype == "float32" and any(arrays[name].dtype is np.float16 for name in arguments):
        raise ValueError(f"{args.pretrained_model} is in float16: --dtype float16")
    return tuple({name: arrays[name] for name in names} for names in (arguments, averages))


def main(arguments=None):
    """Fine-tunes with the flags."""
    parser = cli.Parser(__doc__)
    flag = parser.add_argument_group("pretrained network").add_argument
    flag("--pretrained-model", required=True, metavar="PREFIX[,EPOCH]",
         help="a checkpoint, or a network of the model zoo")
    flag("--layer-before-fullc", help="the layer before the head (default: detected)")
    flag("--freeze", type=cli.non_negative_int, default=0,
         help="number of layers to freeze, counted from the input")
    flag("--bn-momentum", type=cli.fraction, help="momentum of all batch norms")
    train_imagenet.add_flags(parser)
    parser.set_defaults(epochs=3, lr=0.01, lr_decay_epoch=[2], batch_size=32)
    args = train_imagenet.parse_flags(parser, arguments)

    # The pretrained features. The Module freezes a batch norm's averages with its parameters
    symbol, arg_params, aux_params = load(args.pretrained_model)
    features = without_head(symbol, args.layer_before_fullc, args.bn_momentum)
    arg_params, aux_params = parameters_of(features, {**arg_params, **aux_params}, args)
    layers = first_layers(arg_params, args.freeze)
    frozen = [name for name in arg_params if layer_of(name) in layers]

    # A new head. Its parameters are initialized, because they are not in arg_params
    head = mx.sym.FullyConnected(features, num_hidden=args.num_classes, name="new_fc")
    symbol = mx.sym.SoftmaxOutput(head, name="softmax")

    # convert_symbol adds the casts, also the one to float32 before the softmax. The Module keeps
    # float32 copies of float16 weights, and scales gradients
    symbol = amp.convert_symbol(symbol, args.dtype)
    train_imagenet.fit(args, symbol, arg_params, aux_params, frozen)


if __name__ == "__main__":
    cli.run(main)
