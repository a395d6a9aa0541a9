"""For tests of `export_onnx`: runs files in onnxruntime, whole or operator by operator."""
import mxnet as mx
import numpy as np
import onnx
import onnxruntime
from gluon_amp.graph.build import build
from gluon_amp.graph.graph import Graph
from trainers import recorded


def run(model, data):
    """The outputs of a file or a model, by name."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if isinstance(model, str):
        assert unread(onnx.load(model).graph) == set()
    else:  # with `cut`, constants are unread
        options.log_severity_level = 3
        model = model.SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, data)))


def unread(graph):
    """The constants and nodes of a graph that nothing reads; onnxruntime warns of constants."""
    read = {*(name for node in graph.node for name in node.input), *(o.name for o in graph.output)}
    return {one.name for one in graph.initializer if one.name not in read}.union(
        node.name for node in graph.node if not read.intersection(node.output))


def engine_tensors(network, data):
    """Each tensor of a float16 graph as the engine computes it, by its name in MXNet.

    Args:
        network: the graph with its casts, its variables' types and its parameters.
    """
    graph, types, arrays = network.graph, network.types, network.arrays
    entries = [e for e in graph.consumers() if not e.node.is_variable]
    names = dict(zip(entries, Graph(entries).symbol().list_outputs()))
    symbol = build(Graph(entries), types).symbol()
    values = {name: mx.nd.array(array, dtype=types[name])
              for name, array in {**arrays, **data}.items()}
    labels = set(symbol.list_arguments()) - set(values)  # which is not read in prediction
    shapes = dict(zip(symbol.list_arguments(), symbol.infer_shape(
        **{n: a.shape for n, a in values.items() if n in symbol.list_inputs()})[0]))
    values.update((name, mx.nd.zeros(shapes[name])) for name in labels)
    auxiliary = symbol.list_auxiliary_states()
    executor = symbol.bind(mx.cpu(), {n: values[n] for n in symbol.list_arguments()},
                           aux_states={n: values[n] for n in auxiliary}, grad_req="null")
    made = [array.asnumpy() for array in executor.forward(is_train=False)]
    return {names[entry]: array for entry, array in zip(entries, made)}


def cut(model, tensors):
    """The model with each operator alone: readers of these tensors read new inputs, and each tensor
    is an output, so that roundings do not propagate between operators."""
    cut_model = onnx.ModelProto()
    cut_model.CopyFrom(model)
    graph = cut_model.graph
    # the output of a cast behind it has its name
    tensors = {f"{n}_1" if n in [o.name for o in model.graph.output] else n: a
               for n, a in tensors.items()}
    made = [name for node in graph.node for name in node.output if name in tensors]
    for node in graph.node:
        node.input[:] = [f"{name} as read" if name in made else name for name in node.input]
    kind = onnx.helper.np_dtype_to_tensor_dtype
    del graph.output[:]
    for name in made:
        array = tensors[name]
        for place, shown in ((graph.input, f"{name} as read"), (graph.output, name)):
            place.append(onnx.helper.make_tensor_value_info(shown, kind(array.dtype), array.shape))
    return cut_model, {name: tensors[name] for name in made}


def off_by(found, expected):
    """The largest difference, in units of the largest change by one rounding: half a float16 unit
    on each side, and the float32 rounding of the largest terms of a sum."""
    wide, exact = found.astype(np.float64), expected.astype(np.float64)
    unit = np.spacing(np.abs(expected)).astype(np.float64)
    sums = 2.0 ** -20 * (np.abs(exact).max() if exact.size else 0)
    return float((np.abs(wide - exact) / (unit + sums)).max())


def settle(net, data):
    """Sets moving averages to half those of this batch, for activations of usual size."""
    def forget(block):
        if isinstance(block, mx.gluon.nn.BatchNorm):
            block._kwargs["momentum"] = 0.5
    net.apply(forget)
    recorded(net, data).backward()
    mx.nd.waitall()
