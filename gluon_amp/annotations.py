"""Names for annotations: MXNet has no type hints."""
from typing import Any, Callable, Sequence, Tuple, Type, Union

import numpy as np
from mxnet import Context
from mxnet.gluon import Block, Parameter, ParameterDict, Trainer
from mxnet.io import DataBatch, DataDesc, DataIter
from mxnet.kvstore import KVStoreBase
from mxnet.metric import EvalMetric as Metric
from mxnet.module import BaseModule as Module
from mxnet.ndarray import NDArray as Array
from mxnet.optimizer import Optimizer, Updater
from mxnet.symbol import Symbol

__all__ = ["Array", "Arrays", "Batch", "Block", "Context", "DType", "DataBatch", "DataDesc",
           "DataIter", "KVStore", "LossFunction", "Metric", "Module", "Network", "Optimizer",
           "Parameter", "ParameterDict", "Shape", "Symbol", "Trainer", "Updater"]

Arrays = Union[Array, Sequence[Array]]
Network = Union[Block, Module]
Batch = Union[Sequence[Any], DataBatch]
LossFunction = Callable[..., Array]  # takes a network's output and the label
DType = Union[str, Type[Any], "np.dtype[Any]"]
KVStore = Union[str, KVStoreBase, None]
Shape = Tuple[int, ...]
