"""X-rays of files: an exported symbol, its parameters, and batches in numpy files."""
import os
import re
import zipfile
import zlib
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from ..checks import listed, message
from ..cpu.arrays import TYPES_16BIT, to_float32
from ..files import must_exist
from ..gluon.convert import convert
from ..graph.graph import Entry, Graph
from ..graph.operators import LOSSES
from ..inspection.view import View
from ..inspection.xray import xray
from ..policy import Policy, get_policy
from ..symbolic.convert import convert_symbol, declared_types, parameter_names
from ..symbolic.module import Module
from .layers import load

Arrays = Dict[str, Any]
_LOSSES = {"softmax": "SoftmaxCrossEntropyLoss", "sigmoid": "SigmoidBinaryCrossEntropyLoss",
           "l1": "L1Loss", "l2": "L2Loss"}
_PROBABILITIES = ("softmax", "log_softmax", "SoftmaxActivation", "sigmoid")
_NOT_ZIP = (ValueError, OSError, EOFError, AttributeError, TypeError, zipfile.BadZipFile,
            zlib.error)


class _Model(NamedTuple):
    """A symbol and its parameters, the auxiliary ones included.

    Attributes:
        inputs: the names of the data.
        labels: the names of the labels of its losses.
        has_loss: whether the symbol has losses.
    """
    symbol: Any
    parameters: Arrays
    inputs: List[str]
    labels: List[str]
    has_loss: bool


def xray_files(model: str, params: str, data: Sequence[str], label: str = "label",
               loss: Optional[str] = None, policy: str = "float16", steps: int = 20) -> View:
    """Returns the X-ray of a model in files. `gluon-amp xray --help` describes the arguments."""
    chosen = get_policy(policy)
    if chosen.is_float32:
        raise ValueError("an X-ray needs a policy with other types than float32, such as float16. "
                         f"Received: --policy {policy}")
    if loss is not None and loss not in _LOSSES:
        raise ValueError(f"--loss is one of {', '.join(_LOSSES)}. Received: {loss}")
    loaded = _model(model, params)
    if loss and loaded.has_loss:
        raise ValueError("--loss is for a symbol without a loss, and this one has its own: "
                         f"{listed(loaded.symbol.list_outputs())}. Received: --loss {loss}")
    batches = [_batch(path, loaded, label) for path in data[:steps]]
    if loaded.has_loss:
        view = _of_module(loaded, batches, chosen)
    else:
        if any(len(labels) == 0 for _, labels in batches):
            raise ValueError(f"{model} has no loss, so --loss needs a label: an array called "
                             f"{label!r}, or the one of --label. Received: {data[0]} with "
                             f"{_described(_read(data[0]))}")
        view = _of_block(loaded, batches, chosen, loss or "softmax")
    view.name = re.sub(r"(-symbol)?\.json$", "", os.path.basename(model))
    return view


# ---- files --------------------------------------------------------------------------------------


def _model(path: str, params: str) -> _Model:
    symbol = load(path)
    graph = Graph.read(symbol)
    if {*TYPES_16BIT} & {*declared_types(graph).values()}:
        raise ValueError("the symbol is in mixed precision already. Valid: its float32 symbol, "
                         "with the same parameters, such as the argument of convert_symbol. "
                         f"Received: {path}")
    arrays = _parameters(params)
    heads = [entry.node for entry in graph.outputs if entry.node.op in LOSSES]
    variables = symbol.list_inputs()
    labels = [name for name in _labels(heads) if name not in arrays]
    inputs = [name for name in variables if name not in arrays and name not in labels]
    extra = sorted({*arrays} - {*variables})
    needed = parameter_names(graph).union(symbol.list_auxiliary_states())
    missing = sorted(needed.intersection(inputs))
    if extra or missing:
        problems = [f"{params} lacks {listed(missing)}"] if missing else []
        problems += [f"{path} has no {listed(extra)}"] if extra else []
        raise ValueError(f"the parameters do not fit the symbol: {', and '.join(problems)}. "
                         "HybridBlock.export writes both files")
    return _Model(symbol, arrays, inputs, labels, bool(heads))


def _labels(heads: List[Any]) -> List[str]:
    """Returns the variables that only the labels of losses depend on."""
    read = _variables(head.inputs[0] for head in heads)
    return [name for name in _variables(e for head in heads for e in head.inputs[1:])
            if name not in read]


def _variables(entries: Iterable[Entry]) -> Dict[str, None]:
    """Returns the names of the variables that entries depend on."""
    return {node.name: None for node in Graph(list(entries)).nodes() if node.is_variable}


def _parameters(path: str) -> Arrays:
    must_exist(path)
    try:
        arrays = mx.nd.load(path)
    except mx.MXNetError as error:
        raise ValueError(f"MXNet cannot read parameters from {path}: {message(error)}") from None
    if not isinstance(arrays, dict):
        raise ValueError(f"{path} has arrays without names: it is not a file of parameters")
    return {name.split(":", 1)[-1]: to_float32(array) for name, array in arrays.items()}


def _read(path: str) -> Arrays:
    """Returns the arrays of a .npz file."""
    must_exist(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except _NOT_ZIP:
        raise ValueError("--data must be a file of numpy.savez, with an array for each "
                         f"input. Received: {path}") from None
    wrong = [name for name, array in arrays.items() if array.dtype.kind not in "biuf"]
    if wrong:
        raise ValueError(f"{path}: arrays must hold numbers. Received: "
                         f"{listed([f'{n} of {arrays[n].dtype}' for n in wrong])}")
    return arrays


def _described(arrays: Arrays) -> str:
    return listed([f"{name} {array.shape}" for name, array in arrays.items()]) or "no arrays"


def _batch(path: str, model: _Model, label: str) -> Tuple[List[Any], List[Any]]:
    """Returns the data and the labels in a file."""
    arrays = _read(path)
    by_name = dict(arrays)
    wanted = model.labels or ([] if model.has_loss else [label])
    if len(wanted) == 1 and wanted[0] not in by_name and label in by_name:
        by_name[wanted[0]] = by_name.pop(label)
    missing = [name for name in model.inputs + model.labels if name not in by_name]
    unknown = [name for name in by_name if name not in model.inputs + wanted]
    if missing or unknown:
        also = f" or {label}" if len(wanted) == 1 and wanted[0] != label else ""
        raise ValueError(f"{path} must have arrays called {', '.join(model.inputs + wanted)}{also}"
                         f". Received: {_described(arrays)}")
    converted = {name: mx.nd.array(array) for name, array in by_name.items()}
    return [converted[name] for name in model.inputs], \
        [converted[name] for name in wanted if name in converted]


# ---- X-rays -------------------------------------------------------------------------------------


def _of_module(model: _Model, batches: List[Any], policy: Policy) -> View:
    """Returns the X-ray of a symbol with losses."""
    data, labels = batches[0]
    module = Module(convert_symbol(model.symbol, policy, like=False), data_names=model.inputs,
                    label_names=model.labels, context=mx.cpu())
    module.bind([(n, a.shape) for n, a in zip(model.inputs, data)],
                [(n, a.shape) for n, a in zip(model.labels, labels)] or None)
    try:
        module.set_params(model.parameters, model.parameters, allow_extra=True)
    except mx.MXNetError as error:
        raise ValueError("the parameters do not fit the symbol with this data: "
                         f"{message(error)}") from None
    return xray(module, [mx.io.DataBatch(data, labels) for data, labels in batches])


def _of_block(model: _Model, batches: List[Any], policy: Policy, loss: str) -> View:
    """Returns the X-ray of a symbol without a loss."""
    ends = [e.node for e in Graph.read(model.symbol).outputs if e.node.op in _PROBABILITIES]
    if ends and loss in ("softmax", "sigmoid"):
        raise ValueError(f"--loss {loss} takes logits, and the symbol ends in {ends[0].op} "
                         f"({ends[0].name}): export the network without it. Received: --loss "
                         f"{loss}. Valid: l1, l2")
    block = mx.gluon.SymbolBlock(model.symbol, [mx.sym.var(name, dtype="float32")
                                                for name in model.inputs])
    for name, parameter in block.collect_params().items():
        value = model.parameters[name]
        parameter.shape = value.shape
        parameter.initialize(mx.init.Zero(), ctx=mx.cpu())
        parameter.set_data(value)
    loss_fn = getattr(mx.gluon.loss, _LOSSES[loss])()
    convert(block, policy, like=False)
    return xray(block, [(*data, *labels) for data, labels in batches], loss_fn)
