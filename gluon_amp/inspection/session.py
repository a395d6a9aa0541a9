"""Runs a network on batches with a loss, for an X-ray.

    Session       calls the network as its user does, with other CachedOps; finds its graphs, once
    NetworkCopy   runs these graphs in any policy, on copies of the parameters
"""
import itertools
import math
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

import mxnet as mx
import numpy as np

from ..annotations import Array, Block, LossFunction, Network
from ..checks import iterator, message
from ..cpu.arrays import all_finite, copy_into, dtype_name, to_float32
from ..cpu.library import random_numbers_kept
from ..formats import FORMATS
from ..gluon.converted import (
    ConvertedBlock,
    ConvertedHybridBlock,
    Op,
    blocks_in,
    make_op,
    storage_types,
    wide_constants,
)
from ..gluon.observe import cached_ops_freed, hybrid_blocks, observed, policy_in_use
from ..gluon.records import kept_in_blocks
from ..graph.build import check_device
from ..graph.casts import insert_casts
from ..graph.graph import Graph
from ..policy import POLICIES
from ..symbolic.binding import SCALE, with_loss_scale
from .judge import SMALLEST_SCALE
from .layout import Flow, Layout
from .modules import HeadLosses, ModuleBlock, as_block
from .network import can_be_named, outputs_of
from .tensors import Counts, Key, Tensor
from .watch import counted_apart, read


def scales_down(scale: float) -> Iterator[float]:
    """Yields the loss scales that a step tries until its gradients are finite."""
    while scale > SMALLEST_SCALE:
        yield scale
        scale /= 2 ** 4
    yield SMALLEST_SCALE


class Batch(NamedTuple):
    """The network's data, and the labels of the loss; none, or a list with one label or list."""
    data: List[Any]
    label: List[Any]

    @classmethod
    def of(cls, given: Any) -> "Batch":
        """Returns a batch as the user gives it."""
        parts = list(given) if isinstance(given, (list, tuple)) else [given]
        if storage_types(parts):
            raise ValueError("batches must have dense arrays only. Received: "
                             f"{', '.join(storage_types(parts).values())} data")
        batch = cls(parts, []) if len(parts) == 1 else cls(parts[:-1], parts[-1:])
        if not parts or not all(isinstance(array, mx.nd.NDArray) and array.size
                                for array in batch.arrays):
            raise ValueError("a batch is a tuple of arrays that are not empty: data first, and "
                             "last the label or a list of labels. Received: "
                             f"{[_shown(part) for part in parts]}")
        return batch

    @property
    def arrays(self) -> List[Any]:
        """All arrays, those of a list of labels included."""
        several = self.label and isinstance(self.label[0], (list, tuple)) and self.label[0]
        return [*self.data, *(several or self.label)]


def _shown(given: Any) -> Any:
    """Returns the shape of an array of MXNet, or else the type."""
    return given.shape if isinstance(given, mx.nd.NDArray) else type(given).__name__


class StepResult(NamedTuple):
    """The result of a step.

    Attributes:
        scale: the loss scale.
        loss: the mean loss.
        finite: whether the gradients are finite; True for a trainer's step, which may skip.
        counts: the step's counts.
        total: the sum of the absolute losses; gradients are those of the sum.
    """
    scale: float
    loss: float
    finite: bool
    counts: Dict[Key, Counts]
    total: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether loss and gradients are finite."""
        return self.finite and math.isfinite(self.loss)


class BlockGraph(NamedTuple):
    """A hybrid block's graph as it was called: the names of its data, their types and shapes, and
    the nodes that blocks in `keep=` have created."""
    block: Any
    clean: Graph
    names: List[str]
    dtypes: Tuple[str, ...]
    shapes: List[Tuple[int, ...]]
    kept: FrozenSet[str]

    @classmethod
    def from_block(cls, net: Network, block: Block, arrays: List[Any]) -> "BlockGraph":
        """Returns the graph of a block within a network. The block's name prefixes the names of
        its data, which need not be unique."""
        data, clean = block._cached_graph
        graph, names = Graph.read(clean), [d.name for d in data]
        if block is not net:
            for node in graph.nodes():
                if node.is_variable and node.name in names:
                    node.name = block.prefix + node.name
            names = [block.prefix + name for name in names]
        return cls(block, graph, names, tuple(dtype_name(a.dtype) for a in arrays),
                   [a.shape for a in arrays], block.kept_nodes())


class _Traced(Exception):
    """Stops a call of a network after tracing."""


class Session:
    """A network with batches and a loss.

    As a context manager, it finds the network's graphs. It leaves nothing behind in the network,
    and Monitors get the counts of before. Errors name the function `who`.

    Attributes:
        batches: the first `most` batches.
        keep: the nodes that the network keeps in float32.
        graphs: the graphs of training by block, key of a CachedOp, and nesting of data. Names of
            blocks are not unique: all with an empty prefix have one name.
        data: the names of the network's data in these graphs.
    """

    def __init__(self, net: Network, batches: Iterable[Any], loss_fn: Optional[LossFunction],
                 most: int, who: str) -> None:
        self.net, given, self.loss_fn = as_block(net, batches, loss_fn)
        given = iterator(given, "batches is a list of tuples (data, label), or an iterable of them")
        first = list(itertools.islice(given, most))
        if not first:
            raise ValueError(f"{who} needs at least one batch. Received: none")
        _check(self.net, who)
        self.batches = [Batch.of(batch) for batch in first]
        if any(array.ctx.device_type == "gpu" for array in self.batches[0].data):
            raise ValueError(f"{who} runs on CPUs only, where results are counted before they are "
                             "rounded. Received: data on a GPU")
        self.blocks = hybrid_blocks(self.net)
        self.policy, self.parameters = policy_in_use(self.net), self.net.collect_params()
        self.keep = kept_in_blocks(blocks_in(self.net)).nodes
        self.graphs: Dict[Any, BlockGraph] = {}
        self.data: Set[str] = set()
        self._around = ExitStack()

    def __enter__(self) -> "Session":
        with self._around as stack:
            stack.enter_context(mx.autograd.pause())  # of a caller that records
            stack.enter_context(counted_apart())
            stack.enter_context(cached_ops_freed(self.blocks))
            self._find_graphs()
            self._around = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._around.close()

    @cached_property
    def in_named_blocks(self) -> Set[str]:
        """The parameters that become float32 with a node, because `keep=` lists its block."""
        return {name for block in blocks_in(self.net) if can_be_named(self.net, block)
                for name in block.params}

    @cached_property
    def parameter_counts(self) -> Dict[str, Counts]:
        """The counts of the dense parameters. Of one that is 0 because its numbers were too small,
        all become 0."""
        all_counts = {}
        for name, parameter in self.parameters.items():
            format_ = FORMATS.get(dtype_name(parameter.dtype))
            if format_ is None or parameter._stype != "default":
                continue
            counts = Counts.of_array(to_float32(parameter.data())).as_in(format_)
            if getattr(parameter, "was_small", False) and counts.zero == counts.numbers:
                counts = replace(counts, flushed=counts.zero, squares=1.0, error_squares=1.0)
            all_counts[name] = counts
        return all_counts

    @property
    def is_module(self) -> bool:
        return isinstance(self.net, ModuleBlock)

    @property
    def converts(self) -> str:
        """The start of the line of code that converts the network."""
        what = "amp.convert_symbol(symbol" if self.is_module else "amp.convert(net"
        if self.policy == POLICIES["float16"]:
            return what
        name = self.policy.name
        return f"{what}, {repr(name) if POLICIES.get(name) == self.policy else 'policy'}"

    def _find_graphs(self) -> None:
        """Calls the network as in training, which traces graphs and initializes parameters with
        deferred shapes."""
        graphs = NetworkCopy(self)

        def find(block: Block, key: Any, arrays: List[Array]) -> Op:
            self.add_graph(block, key, arrays)
            if block is self.net:  # the graph suffices
                raise _Traced
            return graphs.make(block, key, arrays)

        waiting = any(p._deferred_init for p in self.parameters.values())
        with ExitStack() as stack:
            if not waiting:  # deferred parameters draw random initial values
                stack.enter_context(random_numbers_kept())
            stack.enter_context(suppress(_Traced))
            stack.enter_context(mx.autograd.record())
            stack.enter_context(observed(self.blocks, find))
            outputs_of(self.net, self.batches[0].data)
        mx.nd.waitall()

    def add_graph(self, block: Block, key: Any, arrays: List[Any]) -> Any:
        """Adds the graph of a block during its call. Returns its key in `graphs`."""
        which = block, key, str(block._in_format)
        if which not in self.graphs:
            self.graphs[which] = graph = BlockGraph.from_block(self.net, block, arrays)
            check_device(graph.clean, self.policy, on_gpu=False)
            self.data.update(name for name, array in zip(graph.names, arrays) if block is self.net
                             or any(array is one for one in self.batches[0].data))
        return which

    def named_arrays(self, batch: Batch, graphs: "NetworkCopy") -> Dict[str, Any]:
        """Returns the arrays of these graphs and the data of the network's graph, by name."""
        own = next((of for of in self.graphs.values() if of.block is self.net), None)
        return {**graphs.arrays, **(dict(zip(own.names, batch.data)) if own else {})}

    def loss(self, batch: Batch) -> Array:
        """Returns the loss of a batch, to be differentiated."""
        data, label = batch
        with mx.autograd.record():
            output = outputs_of(self.net, data)
            try:
                loss = self.loss_fn(output, *label)
            except (mx.MXNetError, TypeError, AssertionError) as error:
                several = isinstance(output, (list, tuple))
                received = [_shown(one) for one in [output, *label]]
                raise ValueError(
                    f"loss_fn does not take this output and label: {message(error):.200}. batches "
                    "is a list of tuples (data, label)" + (
                        ". For several outputs, pass a function such as lambda outputs, label: "
                        "loss(outputs[0], label)" if several else "") +
                    f". Received: {received}") from error
        if not isinstance(loss, mx.nd.NDArray):
            raise TypeError("loss_fn(output, label) must return one array. Received: "
                            f"{type(loss).__name__}")
        return loss


class NetworkCopy:
    """A network's graphs on copies of its parameters, and their CachedOps: in its policy with
    further nodes in float32 (`keep`), or all in float32, the reference.

    The engine counts the values of their nodes. Of the reference, it takes samples.

    Attributes:
        arrays: the copies of the parameters that have been used.
    """

    def __init__(self, session: Session, keep: Iterable[str] = (),
                 is_float32: bool = False) -> None:
        self.session = session
        self.policy = POLICIES["float32"] if is_float32 else session.policy
        self.tried = frozenset(keep)
        self.keep = self.tried | session.keep
        self.arrays: Dict[str, Any] = {}
        self.ops: Dict[Any, Op] = {}
        self._types: Dict[Any, Dict[str, str]] = {}
        self._mixed: Dict[Any, Tuple[Graph, Dict[str, str]]] = {}
        # scales the gradients that a module's heads start
        self.scale = mx.nd.ones(1) if session.is_module else None

    # ---- graphs

    def mixed(self, which: Any) -> Tuple[Graph, Dict[str, str]]:
        """Returns a graph with casts, and the types of its variables."""
        if which not in self._mixed:
            of, types = self.session.graphs[which], self._types_in(which)
            declared = {**types, **dict(zip(of.names, of.dtypes))}
            wide = wide_constants({name: self.session.parameters[name] for name in types},
                                  self.policy)
            graph = insert_casts(of.clean, declared, self.policy, getattr(of.block, "weak", types),
                                 self.keep | of.kept, wide)
            self._mixed[which] = graph, declared
        return self._mixed[which]

    def _types_in(self, which: Any) -> Dict[str, str]:
        """Returns the types of a graph's parameters. Those of a kept node are float32 if `keep=`
        lists its block, but not if it lists the node."""
        if which not in self._types:
            of, parameters = self.session.graphs[which], self.session.parameters
            wide = {e.node.name for node in of.clean.nodes() if node.name in self.tried
                    for e in node.inputs if e.node.is_variable}
            if wide and not isinstance(of.block, mx.gluon.SymbolBlock):
                wide &= self.session.in_named_blocks | self.tried
            self._types[which] = {name: "float32" if self.policy.is_float32 or name in wide else
                                  dtype_name(parameters[name].dtype)
                                  for name in of.clean.variables() if name in parameters}
        return self._types[which]

    def types(self) -> Dict[str, str]:
        """Returns the types of the parameters."""
        return {name: dtype for which in self.session.graphs
                for name, dtype in self._types_in(which).items()}

    def weights(self) -> List[Tensor]:
        """Returns the dense parameters as tensors."""
        types = self.types()
        return [Tensor(Key(name, False, 0), "weight", "", 0, FORMATS[types[name]], parameter=name,
                       counts=counts)
                for name, counts in self.session.parameter_counts.items() if name in types]

    @cached_property
    def layout(self) -> Layout:
        kept = self.keep.union(*(of.kept for of in self.session.graphs.values()))
        return Layout(list(map(self.mixed, self.session.graphs)), self.session.parameters, kept,
                      self.session.data)

    def make(self, block: Block, key: Any, arrays: List[Any]) -> Op:
        """Returns the CachedOp that replaces a block's."""
        which = self.session.add_graph(block, key, arrays)
        if which not in self.ops:
            self.ops[which] = self._op(which)
        return self.ops[which]

    def _op(self, which: Any) -> Op:
        block, names = self.session.graphs[which].block, self.session.graphs[which].names
        graph, types = self.mixed(which)
        for node in graph.nodes_within():
            node.attrs.pop("sparse_grad", None)  # copies have dense gradients
        held = {name: self._copied(name, types[name]) for name in graph.variables()
                if name in self.session.parameters}
        if self.scale is not None:
            graph, types = with_loss_scale(graph), {**types, SCALE: "float32"}
            held[SCALE] = self.scale
        copies = {name: SimpleNamespace(data=lambda held=array: held)
                  for name, array in held.items()}
        samples = self.policy.is_float32
        return make_op(block, graph, types, self.policy, names, copies,
                       block._flags if samples else (), watch=True, samples=samples)

    # ---- parameters

    def _copied(self, name: str, dtype: str) -> Array:
        """Returns a copy of a parameter, with a gradient if it trains."""
        if name not in self.arrays:
            parameter = self.session.parameters[name]
            value = parameter.data()
            copy = self.arrays[name] = (to_float32(value) if dtype == "float32" else value).copy()
            if parameter.grad_req != "null":
                copy.attach_grad()
        return self.arrays[name]

    def restore(self) -> None:
        """Resets the copies to the values of the parameters."""
        for name, dtype in self.types().items():
            self._copied(name, dtype)
        copy_into([array.as_nd_ndarray() for array in self.arrays.values()],
                  [self.session.parameters[name].data().as_nd_ndarray() for name in self.arrays])

    # ---- a step

    def run(self, batch: Batch, scale: float = 1.0) -> StepResult:
        """Runs one forward and one backward pass, without an update."""
        session, loss_fn = self.session, self.session.loss_fn
        read()
        if self.scale is not None:
            self.scale[:] = scale
        with observed(session.blocks, self.make):
            loss = session.loss(batch)
        start = mx.nd.ones_like(loss.as_nd_ndarray())
        if not isinstance(loss_fn, HeadLosses):
            start *= scale
        try:
            mx.autograd.backward([loss], [start])
        except mx.MXNetError as error:
            if "graph" not in str(error):
                raise
            raise ValueError("no gradients come from the loss that loss_fn returned: "
                             f"{message(error)}") from error
        counts = read()
        mean, total = mean_and_total(loss)
        if isinstance(loss_fn, HeadLosses):
            total = loss_fn.total(counts)
        gradients = [array.grad for array in self.arrays.values() if array.grad is not None]
        return StepResult(scale, mean, all_finite(gradients), counts, total)

    def step(self, batch: Batch, scales: Iterable[float]) -> StepResult:
        """Runs a step from the values of the parameters, at each of these loss scales until not
        only gradients overflow. MXNet's random numbers are those of before, in each run and
        afterwards.
        """
        with random_numbers_kept() as draw_again:
            for scale in scales:
                draw_again()
                self.restore()
                ran = self.run(batch, scale)
                if ran.finite or not math.isfinite(ran.loss) \
                        or not Flow(self.layout.tensors, ran.counts).goes_forward:
                    break
        return ran


# ---- what is given ------------------------------------------------------------------------------


def _check(net: Network, who: str) -> None:
    """Refuses networks that an X-ray does not support; `who` is the caller."""
    blocks = list(blocks_in(net)) if isinstance(net, ConvertedBlock) else []
    if not any(isinstance(b, ConvertedHybridBlock) for b in blocks):
        plain = isinstance(net, mx.gluon.Block) and not blocks
        hint = ", which is float32: convert it to a 16-bit policy" if plain else ""
        raise TypeError(f"{who} takes a network that gluon_amp.convert has converted, with a "
                        "HybridBlock in it, whose graph it inspects. "
                        f"Received: {type(net).__name__}{hint}")
    own = [name for b in blocks if not isinstance(b, mx.gluon.HybridBlock) for name in b.params]
    if own:
        raise ValueError(f"{who} inspects graphs, and a plain Block has parameters of its own: "
                         f"move them into a HybridBlock. Received: {', '.join(own[:5])}")


def mean_and_total(loss: Array) -> Tuple[float, float]:
    """Returns the mean of the losses, and the sum of their absolute values."""
    loss = loss.as_nd_ndarray().astype("float32", copy=False)
    return float(loss.mean().asscalar()), float(np.abs(loss.asnumpy()).sum(dtype=np.float64))
