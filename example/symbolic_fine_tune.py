"""Fine-tunes a pretrained network with the Symbolic API, in float32 or float16.

    python symbolic_fine_tune.py --pretrained-model my_network,90 --dtype float16 \\
        --num-classes 10 --image-shape 3,112,112 --rgb-mean 127,127,127 --rgb-std 128,128,128 \\
        --bn-momentum 0.8 --data-train train.rec --data-val test.rec

reads my_network-symbol.json and my_network-0090.params. The old head is what lies between the
last fully connected layer and the output; a new one takes its place. Batch norm's moving averages
may lag in short trainings: --bn-momentum 0.8.
"""
import argparse
import difflib
import os

import command
import gluon_amp as amp
import image_data
import module_fit
import mxnet as mx
from gluon_amp.graph.graph import Entry, Graph


def load(name):
    """The symbol and the parameters of PREFIX[,EPOCH], or of a network of the model zoo."""
    prefix, _, epoch = name.partition(",")
    if os.path.exists(f"{prefix}-symbol.json"):
        params = f"{prefix}-{int(epoch or 0):04d}.params"
        if not os.path.exists(params):
            raise SystemExit(f"{params} does not exist")
        return mx.model.load_checkpoint(prefix, int(epoch or 0))
    try:
        net = mx.gluon.model_zoo.vision.get_model(prefix, pretrained=True)
    except ValueError:
        raise SystemExit(f"{prefix}-symbol.json does not exist, and MXNet's model zoo has no "
                         f"{prefix}") from None
    except OSError as error:
        raise SystemExit(f"{prefix}: the model zoo's file could not be downloaded "
                         f"({type(error).__name__})") from None
    values = {name: p.data() for name, p in net.collect_params().items()}
    symbol = net(mx.sym.var("data"))
    auxiliary = symbol.list_auxiliary_states()
    return (symbol, {n: v for n, v in values.items() if n not in auxiliary},
            {n: values[n] for n in auxiliary})


def layer_before_head(graph, name=None):
    """The output of the layer before the last fully connected one, or of the layer `name`."""
    layers = {node.name: node for node in graph.nodes() if not node.is_variable}
    if name:
        node = layers.get(name) or layers.get(name.replace("_output", ""))
        if node is None:
            close = difflib.get_close_matches(name, layers, n=5, cutoff=0.3)
            raise SystemExit(f"--layer-before-fullc: there is no layer {name}. Near it: "
                             f"{', '.join(close or list(layers)[-5:])}")
        return Entry(node)
    node = graph.outputs[0].node
    while node.op != "FullyConnected":
        if node.is_variable or not node.inputs:
            raise SystemExit("the network's head is unknown: no FullyConnected lies before its "
                             "output. Choose --layer-before-fullc among "
                             f"{', '.join(list(layers)[-5:])}")
        node = node.inputs[0].node
    return node.inputs[0]


def with_new_head(symbol, num_classes, before=None, bn_momentum=None, freeze=False):
    """The network up to that layer, and a new classifier behind it."""
    graph = Graph.read(symbol)
    graph = Graph([layer_before_head(graph, before)])
    if "data" not in graph.variables():
        raise SystemExit("the network has no argument named data. Its arguments begin with "
                         f"{', '.join(graph.variables()[:3])}")
    for node in graph.nodes():
        if node.op == "BatchNorm" and bn_momentum is not None:
            node.attrs["momentum"] = str(bn_momentum)
        if node.op == "BatchNorm" and freeze:
            node.attrs["use_global_stats"] = "True"
    features = graph.symbol()
    head = mx.sym.FullyConnected(features, num_hidden=num_classes, name="new_fc")
    return features, mx.sym.SoftmaxOutput(head, name="softmax")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=command.Help)
    parser.add_argument("--pretrained-model", required=True, metavar="PREFIX[,EPOCH]",
                        help="a checkpoint, or a name of the model zoo")
    parser.add_argument("--layer-before-fullc", help="found by itself where not given")
    parser.add_argument("--freeze", type=int, default=0, choices=(0, 1),
                        help="1: train the new head only")
    parser.add_argument("--bn-momentum", type=float, help="of all batch norms")
    module_fit.add_arguments(parser)
    image_data.add_arguments(parser)
    parser.set_defaults(num_epochs=3, lr=0.01, lr_step_epochs=[2], batch_size=32)
    args = parser.parse_args(arguments)

    symbol, arg_params, aux_params = load(args.pretrained_model)
    features, symbol = with_new_head(symbol, args.num_classes, args.layer_before_fullc,
                                     args.bn_momentum, bool(args.freeze))
    body = set(features.list_arguments()) - {"data"}
    missing = sorted((body | set(features.list_auxiliary_states()))
                     - {*arg_params, *aux_params})
    if missing:
        raise SystemExit(f"{args.pretrained_model} lacks parameters: {', '.join(missing[:10])}")
    if args.dtype == "float32" and "float16" in {v.dtype.__name__ for v in arg_params.values()}:
        raise SystemExit(f"{args.pretrained_model} is in float16: --dtype float16")
    symbol = amp.convert_symbol(symbol, args.dtype)
    module_fit.fit(args, symbol, {n: v for n, v in arg_params.items() if n in body},
                   {n: aux_params[n] for n in features.list_auxiliary_states()},
                   sorted(body) if args.freeze else None)


if __name__ == "__main__":
    command.run(main)
