"""Runs a network on batches with a loss for an X-ray, a search or a Monitor.

    Session   finds the network's graphs, once
    Graphs    runs them in any policy with back-off, on copies of the parameters or on the
              parameters themselves
    Updates   runs a trainer's steps, and counts what they add to the parameters

The network is called as by its user. Meanwhile `Graphs.make` replaces the CachedOps of its hybrid
blocks (`State.stand_in`).
"""
import copy
import itertools
import math
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Set,
    Tuple,
)

from .._mxnet import message, mx, np
from ..annotations import Array, Batch, Block, LossFunction, Network
from ..annotations import Trainer as GluonTrainer
from ..cpu import library
from ..cpu.arrays import copy_into, dtype_name, follow, is_half, to_float32
from ..cpu.finite import all_finite, squares
from ..cpu.library import random_numbers_kept
from ..formats import FLOAT32, FORMATS, Format
from ..gluon.converted import ConvertedBlock, ConvertedHybridBlock
from ..gluon.parameter import follows
from ..gluon.state import Op, blocks_in
from ..graph.build import build, cached_op
from ..graph.casts import insert_casts
from ..graph.graph import Graph
from ..graph.refusals import check_device
from ..graph.sparse import storage_types
from ..policy import POLICIES
from ..symbolic.binding import SCALE, with_loss_scale
from ..training.loss_scale import LossScaleError, lower_scales
from ..training.optimizer import master_in
from ..training.step import clear_added
from ..training.trainer import Trainer
from .modules import HeadLosses, ModuleBlock, bound_module, looked_at
from .network import can_be_named, outputs_of, standing_in
from .statistics import Counted, Counts, both_ways, read
from .tensors import Layout, Tensor

FIRST_SCALE = 2.0 ** 16  # the first loss scale of a back-off
SMALLEST_SCALE = 2.0 ** -24  # the last loss scale of a back-off


class Ran(NamedTuple):
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
    counts: Counted
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
                   [a.shape for a in arrays], block._amp.kept)


class _Traced(Exception):
    """Stops a call of a network after tracing."""


class Session:
    """A network with batches and a loss.

    Attributes:
        batches: the first `most` batches.
        graphs: the graphs of training by block, key of a CachedOp, and nesting of data. Names of
            blocks are not unique: all with an empty prefix have one name.
        data: the names of the network's data in these graphs.

    Args:
        net: the network.
        batches: the batches.
        loss_fn: the loss function.
        most: the number of batches.
        who: the name of the caller in errors.
    """

    def __init__(self, net: Network, batches: Iterable[Any], loss_fn: Optional[LossFunction],
                 most: int, who: str) -> None:
        self.net, given, self.loss_fn = looked_at(net, batches, loss_fn)
        self.batches = first_of(given, most, who)
        check(self.net, self.batches[0])
        self.policy, self.parameters = self.net._amp.policy, self.net.collect_params()
        self.graphs: Dict[Any, BlockGraph] = {}
        self.data: Set[str] = set()
        self._find_graphs()

    @cached_property
    def in_named_blocks(self) -> Set[str]:
        """Returns the parameters that become float32 with a node, because `keep=` lists its block.
        """
        return {name for block in blocks_in(self.net) if can_be_named(self.net, block)
                for name in block.params}

    @property
    def is_module(self) -> bool:
        return isinstance(self.net, ModuleBlock)

    @property
    def converts(self) -> str:
        """The start of the line of code that converts the network."""
        if self.is_module:
            return "amp.convert_symbol(symbol"
        name, is_default = self.policy.name, self.policy == POLICIES["float16"]
        policy = repr(name) if POLICIES.get(name) == self.policy else "policy"
        return "amp.convert(net" + ("" if is_default else f", {policy}")

    def _find_graphs(self) -> None:
        """Calls the network as in training, which traces graphs and initializes parameters with
        deferred shapes."""
        graphs = Graphs(self)

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
            stack.enter_context(standing_in(self.net, find))
            outputs_of(self.net, split(self.batches[0])[0])
        mx.nd.waitall()

    def add_graph(self, block: Block, key: Any, arrays: List[Any]) -> Any:
        """Adds the graph of a block during its call. Returns its key in `graphs`."""
        which = block, key, str(block._in_format)
        if which not in self.graphs:
            self.graphs[which] = made = BlockGraph.from_block(self.net, block, arrays)
            data = split(self.batches[0])[0]
            self.data.update(name for name, array in zip(made.names, arrays)
                             if block is self.net or any(array is one for one in data))
        return which

    def low(self, keep: Iterable[str] = (), watch: bool = True) -> "Graphs":
        """Returns the network in its policy, with these nodes in float32 too."""
        return Graphs(self, keep, watch=watch)

    def float32(self, watch: bool = True, samples: bool = False) -> "Graphs":
        """Returns the network in float32."""
        return Graphs(self, is_float32=True, watch=watch, samples=samples)

    def known(self, batch: Batch, graphs: "Graphs") -> Dict[str, Any]:
        """Returns the arrays of these graphs and the data of the network's graph, by name."""
        own = next((of for of in self.graphs.values() if of.block is self.net), None)
        return {**graphs.arrays, **(dict(zip(own.names, split(batch)[0])) if own else {})}


class Graphs:
    """A network's graphs and their CachedOps.

    Attributes:
        arrays: copies of the parameters that have been used.

    Args:
        session: the network.
        keep: names of nodes that stay float32, besides those that the network keeps.
        is_float32: whether this is the float32 reference, without casts.
        watch: whether the engine counts the nodes' values.
        samples: whether the engine takes samples instead of counts.
        own: whether to run on the network's parameters instead of copies.
    """

    def __init__(self, session: Session, keep: Iterable[str] = (), is_float32: bool = False,
                 watch: bool = True, samples: bool = False, own: bool = False) -> None:
        self.session, self.watch, self.samples, self.own = session, watch, samples, own
        self.policy = POLICIES["float32"] if is_float32 else session.policy
        self.tried = frozenset(keep)
        self.keep = self.tried.union(*(block._amp.keep_nodes for block in
                                            blocks_in(session.net)
                                            if isinstance(block, ConvertedBlock)))
        self.arrays: Dict[str, Any] = {}
        self.ops: Dict[Any, Op] = {}
        # scales the gradients that a module's heads start
        self.scale = mx.nd.ones(1) if session.is_module else None

    # ---- graphs

    def typed(self) -> List[Tuple[Graph, Dict[str, str]]]:
        """Returns the graphs with casts, and the types of their variables."""
        return [self._typed(of) for of in self.session.graphs.values()]

    def _types(self, of: BlockGraph) -> Dict[str, str]:
        """Returns the types of a graph's parameters. Those of a kept node are float32 if `keep=`
        lists its block, but not if it lists the node."""
        parameters = self.session.parameters
        wide = {e.node.name for node in of.clean.nodes() if node.name in self.tried
                for e in node.inputs if e.node.is_variable}
        if wide and not isinstance(of.block, mx.gluon.SymbolBlock):
            wide &= self.session.in_named_blocks
        return {name: "float32" if self.policy.is_float32 or name in wide else
                dtype_name(parameters[name].dtype)
                for name in of.clean.variables() if name in parameters}

    def _typed(self, of: BlockGraph) -> Tuple[Graph, Dict[str, str]]:
        types, policy = self._types(of), of.block._amp.policy if self.own else self.policy
        known = {**types, **dict(zip(of.names, of.dtypes))}
        wide = [name for name in types
                if not follows(self.session.parameters[name], policy.between)]
        return insert_casts(of.clean, known, policy, types,
                            () if self.policy.is_float32 else self.keep | of.kept, wide), known

    @cached_property
    def layout(self) -> Layout:
        kept = self.keep.union(*(of.kept for of in self.session.graphs.values()))
        return Layout(self.typed(), self.policy, self.session.parameters, kept,
                      self.session.data)

    @cached_property
    def tensors(self) -> List[Tensor]:
        return self.layout.tensors()

    def make(self, block: Block, key: Any, arrays: List[Any]) -> Op:
        """Returns the CachedOp that replaces a block's."""
        which = self.session.add_graph(block, key, arrays)
        if which not in self.ops:
            self.ops[which] = self._op(self.session.graphs[which])
        return self.ops[which]

    def _op(self, of: BlockGraph) -> Op:
        graph, types = self._typed(of)
        state = of.block._amp
        if self.own:
            policy, scales, place = state.policy, state.scales, of.block.place
            parameters: Dict[str, Any] = self.session.parameters
        else:
            policy, scales, place = self.policy, None, str
            for node in graph.nodes_within():
                node.attrs.pop("sparse_grad", None)  # copies have dense gradients
            held = {name: self._copied(name, types[name]) for name in graph.variables()
                    if name in self.session.parameters}
            if self.scale is not None:
                graph, types = with_loss_scale(graph), {**types, SCALE: "float32"}
                held[SCALE] = self.scale
            parameters = {name: SimpleNamespace(data=lambda held=array: held)
                          for name, array in held.items()}
        check_device(graph, policy, on_gpu=False)
        symbol = build(graph, types, policy, self.watch, self.samples, scales, place).symbol()
        if isinstance(of.block._cached_graph[1], mx.sym.numpy._Symbol):
            symbol = symbol.as_np_ndarray()
        return cached_op(symbol, of.names, parameters,
                         of.block._flags if self.own or self.samples else ())

    # ---- parameters

    def _copied(self, name: str, dtype: str) -> Array:
        """Returns a copy of a parameter, with a gradient if it trains."""
        if name not in self.arrays:
            parameter = self.session.parameters[name]
            value = parameter.data()
            made = self.arrays[name] = (to_float32(value) if dtype == "float32" else value).copy()
            if parameter.grad_req != "null":
                made.attach_grad()
        return self.arrays[name]

    def restore(self, values: Optional[Dict[str, Any]] = None) -> None:
        """Resets the copies to the parameters' current values, or to `values`."""
        for of in self.session.graphs.values():
            for name, dtype in self._types(of).items():
                self._copied(name, dtype)
        given = [self.session.parameters[name].data() if values is None else values[name]
                 for name in self.arrays]
        copy_into([array.as_nd_ndarray() for array in self.arrays.values()],
                  [value.as_nd_ndarray() for value in given])

    def gradients(self) -> List[Any]:
        """Returns the parameters' gradients of the last run."""
        return [array.grad for array in self.arrays.values() if array.grad is not None]

    # ---- a step

    def run(self, batch: Batch, scale: float = 1.0) -> Ran:
        """Runs one forward and one backward pass, without an update."""
        loss_fn = self.session.loss_fn
        read()
        if self.scale is not None:
            self.scale[:] = scale
        with mx.autograd.record(), standing_in(self.session.net, self.make):
            loss = loss_of(self.session.net, batch, loss_fn)
        begins_with = 1.0 if isinstance(loss_fn, HeadLosses) else scale
        try:
            mx.autograd.backward([loss], [mx.nd.ones_like(loss.as_nd_ndarray()) * begins_with])
        except mx.MXNetError as error:
            if "graph" not in str(error):
                raise
            raise ValueError("no gradients come from the loss that loss_fn returned: "
                             f"{message(error)}") from error
        counts = read()
        mean, total = mean_and_total(loss)
        if isinstance(loss_fn, HeadLosses):
            total = loss_fn.total(counts)
        return Ran(scale, mean, all_finite(self.gradients()), counts, total)

    def back_off(self, batch: Batch, scale: float, prepare: Callable[[], object],
                 goes_forward: Callable[[Ran], bool] = lambda ran: True) -> Ran:
        """Runs a step, and repeats it at lower loss scales while only gradients overflow.

        Args:
            batch: the batch.
            scale: the first loss scale.
            prepare: called before each run; resets copies and random numbers.
            goes_forward: returns whether the forward pass is finite.
        """
        for at in (scale, *lower_scales(scale, SMALLEST_SCALE)):
            prepare()
            ran = self.run(batch, at)
            if ran.finite or not (math.isfinite(ran.loss) and goes_forward(ran)):
                break
        return ran


# ---- batches, and the network's call ------------------------------------------------------------


def split(batch: Batch) -> Tuple[List[Any], List[Any]]:
    """Splits a batch into the network's data and the labels of the loss."""
    parts = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    if storage_types(parts):
        raise ValueError("xray, explain and search support dense arrays only. Received: "
                         f"{', '.join(storage_types(parts).values())} data")
    if not parts or not all(isinstance(array, mx.nd.NDArray) and array.size
                            for array in arrays_of(parts)):
        raise ValueError("a batch is a tuple of arrays that are not empty: data first, and last "
                         "the label or a list of labels. "
                         f"Received: {[getattr(p, 'shape', type(p).__name__) for p in parts]}")
    return (parts, []) if len(parts) == 1 else (parts[:-1], parts[-1:])


def arrays_of(parts: Any) -> List[Any]:
    """Returns all arrays of a batch, those of a list of labels included."""
    *first, last = parts
    several = bool(first) and isinstance(last, (list, tuple)) and len(last) > 0
    return [*first, *(last if several else [last])]


def first_of(batches: Iterable[Batch], count: int, who: str) -> List[Any]:
    """Returns the first `count` batches at most."""
    try:
        given = iter(batches)
    except TypeError:
        raise TypeError("batches is a list of tuples (data, label), or an iterable of them. "
                        f"Received: {type(batches).__name__}") from None
    found = list(itertools.islice(given, count))
    if not found:
        raise ValueError(f"{who} needs at least one batch. Received: none")
    return found


def check(net: Network, batch: Batch) -> None:
    """Refuses networks and data that an X-ray does not support."""
    blocks = list(blocks_in(net)) if isinstance(net, ConvertedBlock) else []
    if not any(isinstance(b, ConvertedHybridBlock) for b in blocks):
        plain = isinstance(net, mx.gluon.Block) and not blocks
        hint = ", which is float32: convert it to a 16-bit policy" if plain else ""
        raise TypeError("xray takes a network that gluon_amp.convert has converted, with a "
                        "HybridBlock in it, whose graph it inspects. "
                        f"Received: {type(net).__name__}{hint}")
    if net._amp.policy.is_float32:
        raise ValueError("the network is float32: convert it to a 16-bit policy")
    own = [name for b in blocks if not isinstance(b, mx.gluon.HybridBlock) for name in b.params]
    if own:
        raise ValueError("xray inspects graphs, and a plain Block has parameters of its own: move "
                         f"them into a HybridBlock. Received: {', '.join(own[:5])}")
    if any(array.ctx.device_type == "gpu" for array in split(batch)[0]):
        raise ValueError("xray runs on CPUs only, where results are counted before they are "
                         "rounded. Received: data on a GPU")


def loss_of(net: Network, batch: Batch, loss_fn: LossFunction) -> Array:
    """Returns the loss of a batch."""
    data, label = split(batch)
    output = outputs_of(net, data)
    try:
        loss = loss_fn(output, *label)
    except (mx.MXNetError, TypeError) as error:
        shapes = [getattr(a, "shape", type(a).__name__) for a in [output, *label]]
        raise ValueError(f"loss_fn does not take this output and label: {message(error)}. batches "
                         f"is a list of tuples (data, label). Received: {shapes}") from error
    if not isinstance(loss, mx.nd.NDArray):
        raise TypeError("loss_fn(output, label) must return one array. Received: "
                        f"{type(loss).__name__}")
    return loss


def mean_and_total(loss: Array) -> Tuple[float, float]:
    """Returns the mean of the losses, and the sum of their absolute values."""
    loss = loss.as_nd_ndarray().astype("float32", copy=False)
    return float(loss.mean().asscalar()), float(np.abs(loss.asnumpy()).sum(dtype=np.float64))


# ---- a trainer's own steps, and what is added to parameters -------------------------------------


@dataclass
class Weight:
    """The counts of a parameter and of its updates.

    Attributes:
        counts: the parameter's counts in the last step.
        updates: the counts of all updates; None without a trainer.
        without_master: the share of updates that would be lost without master weights; None
            without a trainer, and for a float16 parameter that has no master weight.
        format: the parameter's format.
    """
    name: str
    counts: Counts
    updates: Optional[Counts] = None
    without_master: Optional[float] = None
    format: Format = FLOAT32


def check_trainer(trainer: GluonTrainer, net: Network) -> None:
    """Refuses a trainer that cannot take a step of the network."""
    if isinstance(net, mx.mod.BaseModule):
        raise TypeError("trainer= is for Gluon: for a Module, the X-ray runs on copies")
    if not isinstance(trainer, mx.gluon.Trainer):
        raise TypeError("trainer is a gluon_amp.Trainer, or MXNet's. "
                        f"Received: {type(trainer).__name__}")
    own = {id(p) for p in net.collect_params().values()} if hasattr(net, "collect_params") else ()
    if not any(id(parameter) in own for parameter in trainer._params):
        raise ValueError("the trainer has none of the network's parameters")
    if isinstance(trainer, Trainer) and trainer._step.begun:
        raise ValueError("gradients wait for the trainer's step: call step() before the X-ray, "
                         "which takes a step for each batch")


class Updates:
    """Runs a trainer's steps, and counts their updates of the parameters.

    Attributes:
        gave_up: the trainer's LossScaleError, after which it takes no step; "" before.
    """

    def __init__(self, session: Session, trainer: Optional[GluonTrainer] = None,
                 batch_size: Optional[int] = None) -> None:
        self.session, self.batch_size = session, batch_size
        self.trainer: Any = trainer
        self.parameters = [p for p in session.parameters.values()
                           if p.grad_req != "null" and p._stype == "default"]
        self.added: Dict[str, library.Updates] = defaultdict(library.Updates)  # in all steps
        self.watched = Graphs(session, own=True)
        self.gave_up = ""
        self.last: Dict[str, np.ndarray[Any, Any]] = {}  # the parameters after the last step

    def step(self, batch: Batch) -> Ran:
        """Runs the trainer's step and counts it."""
        passes: List[Tuple[float, Counted]] = []

        def passed(scale: float) -> None:
            passes.append((scale, read()))
        clear_added(self.trainer._params)
        read()
        if not self.last:
            self.last = {p.name: self._value(p).asnumpy() for p in self.parameters}
        with mx.autograd.record(), standing_in(self.session.net, self.watched.make):
            loss = loss_of(self.session.net, batch, self.session.loss_fn)
        if isinstance(self.trainer, Trainer):
            before, self.trainer.after_pass = self.trainer.after_pass, passed
            try:
                self.trainer.backward(loss)
            finally:
                self.trainer.after_pass = before
        else:
            loss.backward()
            passed(1.0)
        workers = getattr(self.trainer, "workers", 1)
        try:
            self.trainer.step(self.batch_size or split(batch)[0][0].shape[0] * workers)
        except LossScaleError as error:
            self.gave_up = str(error)
        clear_added(self.trainer._params)
        self.count({p.name: self._value(p) for p in self.parameters})
        scale, backward = [one for one in passes if one[0]][-1]  # scale 0: the check of heads
        mean, total = mean_and_total(loss)
        return Ran(scale, mean, True, both_ways(passes[0][1], backward), total)

    def count(self, values: Dict[str, Any]) -> None:
        """Counts the differences between parameters and their values in `last`."""
        library.count_updates([*values.values()], [self.last[name] for name in values],
                              [self.added[name] for name in values])

    def _value(self, parameter: Any) -> Any:
        """Returns a parameter's master weight, or the parameter if it has none."""
        return _wide(parameter.data(), self._master(parameter))

    def _master(self, parameter: Any) -> Array:
        return _master_of(self.trainer._updaters[0], self.trainer._param2idx.get(parameter.name),
                          parameter.data())

    def weights(self) -> List[Weight]:
        """Returns the counts of all parameters."""
        made = []
        for p in self.parameters:
            added, half = self.added.get(p.name), is_half(p.data().dtype)
            made.append(Weight(p.name, Counts.of_array(to_float32(p.data())),
                               format=FORMATS[dtype_name(p.data().dtype)]))
            if added is not None:
                made[-1].updates = Counts.of_structure(added.counts)
                if not half or self._master(p) is not None:  # otherwise updates are already lost
                    made[-1].without_master = added.lost / max(added.changed, 1)
        return made


class ModuleUpdates(Updates):
    """Counts what a Module's optimizer would add to its parameters.

    Each update starts from the current parameters, master weights and states. Without an optimizer,
    or if servers update, there is none.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.module = bound_module(session.net.module)
        self.masters: Dict[str, Any] = {}  # master weights in the last step
        self.updater: Any = None
        if self.module.optimizer_initialized:
            on_store = self.module._update_on_kvstore
            self.updater = (self.module._kvstore if on_store else self.module)._updater

    def would_add(self, graphs: Graphs, scale: float) -> None:
        """Counts the updates by the gradients of the last run, at this loss scale."""
        if self.updater is None:
            return
        group, devices = self.module._exec_group, len(self.module._context)
        by_name = self.module._update_on_kvstore
        made = [(name, name if by_name else i * devices, weights[0].copy()) for i, (
            name, weights, own) in enumerate(zip(group.param_names, group.param_arrays,
                                                 group.grad_arrays))
                if own[0] is not None and name in graphs.arrays]
        names, indices, weights = map(list, zip(*made))
        gradients = [graphs.arrays[name].grad.astype(weight.dtype, copy=False)
                     for name, weight in zip(names, weights)]
        updater = self._copied_updater()
        optimizer = updater.optimizer
        for name, index, weight in made:
            master = _master_of(updater, index, weight)
            if master is not None:
                follow(master, weight)
            self.last[name] = _wide(weight, master).asnumpy().copy()
        optimizer.rescale_grad *= self._clipped(gradients, optimizer.rescale_grad / scale) / scale
        updater(indices, gradients, weights)
        self.masters = {name: _master_of(updater, index, weight) for name, index, weight in made}
        self.count({name: _wide(weight, self.masters[name]) for name, _, weight in made})

    def _copied_updater(self) -> Any:
        made = mx.optimizer.get_updater(copy.deepcopy(self.updater.optimizer))
        fitting = getattr(self.session.net.module, "_fitting_states", None)  # loaded from a file
        made.set_states(self.updater.get_states())
        if fitting:
            made.states = copy.deepcopy(fitting[1])
            made.states_synced = dict.fromkeys(made.states, False)
        return made

    def _clipped(self, gradients: List[Any], factor: float) -> float:
        """Returns the factor by which `clip_norm` scales the gradients times `factor`."""
        steps = getattr(self.session.net.module, "_step", None)
        if steps is None or steps.max_norm is None:
            return 1.0
        norm = math.sqrt(float(squares(gradients).sum())) * factor
        return min(steps.max_norm / norm, 1.0) if norm else 1.0

    def _master(self, parameter: Any) -> Array:
        return self.masters.get(parameter.name)


def _wide(weight: Array, master: Array) -> Array:
    """Returns a weight in float32: its master weight, or the weight if it has none."""
    return to_float32(weight) if master is None else master


def _master_of(updater: Any, index: Any, weight: Array) -> Array:
    return master_in(updater.optimizer, updater.states.get(index)) \
        if is_half(weight.dtype) else None
