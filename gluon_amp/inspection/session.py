"""A network, its batches and its loss while they are looked into.

    Session   finds the network's graphs, once
    Graphs    runs them in any policy, and backs off: on copies of the parameters, which change
              nothing of the user's, or on the parameters themselves
    Updates   a trainer's own steps, and what these add to the parameters

A network is called as its user calls it. Meanwhile `Graphs.make` stands in for what runs the graphs
of its hybrid blocks (`State.stand_in`).
"""
import copy
import itertools
import math
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

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
from ..policy import POLICIES
from ..symbolic.binding import SCALE, with_loss_scale
from ..training.gradients import clear_added
from ..training.loss_scale import LossScaleError, lower_scales
from ..training.optimizer import master_in
from ..training.trainer import Trainer
from .modules import HeadLosses, ModuleBlock, bound_module, looked_at
from .network import can_be_named, outputs_of, standing_in
from .statistics import Counted, Counts, both_ways, read
from .tensors import Layout, Tensor

FIRST_SCALE = 2.0 ** 16  # loss scales: where looking for one that overflows nothing begins,
SMALLEST_SCALE = 2.0 ** -24  # and where it ends


class Ran(NamedTuple):
    """A step that was run.

    Attributes:
        scale: its loss scale.
        loss: the mean of its numbers.
        finite: whether the gradients are; of a trainer's own step, which may be skipped, True.
        counts: what was counted.
        total: the sum of the sizes of the loss's numbers, whose sum is what gradients are of.
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
    """A hybrid block's graph as it was called: the names of its data, their types and shapes."""
    block: Any
    clean: Graph
    names: List[str]
    dtypes: Tuple[str, ...]
    shapes: List[Tuple[int, ...]]

    @classmethod
    def from_block(cls, net: Network, block: Block, arrays: List[Any]) -> "BlockGraph":
        """The graph of a block within a network. Its data get the block's name as a prefix,
        since data of other blocks may have the same names."""
        data, clean = block._cached_graph
        graph, names = Graph.read(clean), [d.name for d in data]
        if block is not net:
            for node in graph.nodes():
                if node.is_variable and node.name in names:
                    node.name = block.prefix + node.name
            names = [block.prefix + name for name in names]
        return cls(block, graph, names, tuple(dtype_name(a.dtype) for a in arrays),
                   [a.shape for a in arrays])


class _Traced(Exception):
    """Ends a call of a network that has its graph."""


class Session:
    """What is looked into.

    Attributes:
        batches: the first that were given.
        graphs: the graphs that training runs: by block, by what a CachedOp depends on, and by how
            data is nested. Blocks may have one name, such as all whose prefix is "".

    Args:
        most: how many batches are used.
        who: is called what in errors.
    """

    def __init__(self, net: Network, batches: Iterable[Any], loss_fn: Optional[LossFunction],
                 most: int, who: str) -> None:
        self.net, given, self.loss_fn = looked_at(net, batches, loss_fn)
        self.batches = first_of(given, most, who)
        check(self.net, self.batches[0])
        self.policy, self.parameters = self.net._amp.policy, self.net.collect_params()
        self.graphs: Dict[Any, BlockGraph] = {}
        self._find_graphs()

    @cached_property
    def in_named_blocks(self) -> Set[str]:
        """The parameters that become float32 with a node that reads them, since `keep=` names the
        node's block."""
        return {name for block in blocks_in(self.net) if can_be_named(self.net, block)
                for name in block.params}

    @property
    def is_module(self) -> bool:
        return isinstance(self.net, ModuleBlock)

    @property
    def converts(self) -> str:
        """How a line begins that converts the network as it is."""
        if self.is_module:
            return "amp.convert_symbol(symbol"
        name, is_default = self.policy.name, self.policy == POLICIES["float16"]
        policy = repr(name) if POLICIES.get(name) == self.policy else "policy"
        return "amp.convert(net" + ("" if is_default else f", {policy}")

    def _find_graphs(self) -> None:
        """Calls the network as training does. Makes what the user's first call would make: graphs,
        and the parameters where some wait for the data's shapes."""
        graphs = Graphs(self)

        def find(block: Block, key: Any, arrays: List[Array]) -> Op:
            self.add_graph(block, key, arrays)
            if block is self.net:  # nothing need run
                raise _Traced
            return graphs.make(block, key, arrays)

        waiting = any(p._deferred_init for p in self.parameters.values())
        with ExitStack() as stack:
            if not waiting:  # those who wait draw their first values
                stack.enter_context(random_numbers_kept())
            stack.enter_context(suppress(_Traced))
            stack.enter_context(mx.autograd.record())
            stack.enter_context(standing_in(self.net, find))
            outputs_of(self.net, split(self.batches[0])[0])
        mx.nd.waitall()

    def add_graph(self, block: Block, key: Any, arrays: List[Any]) -> Any:
        """Takes in the graph of a block that is called now. Returns what it goes by in `graphs`."""
        which = block, key, str(block._in_format)
        if which not in self.graphs:
            self.graphs[which] = BlockGraph.from_block(self.net, block, arrays)
        return which

    def low(self, keep: Iterable[str] = (), watch: bool = True) -> "Graphs":
        """The network in its own policy, with these nodes in float32, too."""
        return Graphs(self, keep, watch=watch)

    def float32(self, watch: bool = True, samples: bool = False) -> "Graphs":
        """The network in float32."""
        return Graphs(self, is_float32=True, watch=watch, samples=samples)

    def known(self, batch: Batch, graphs: "Graphs") -> Dict[str, Any]:
        """The arrays of these graphs, and the data that the network's own graph reads, by name."""
        own = next((of for of in self.graphs.values() if of.block is self.net), None)
        return {**graphs.arrays, **(dict(zip(own.names, split(batch)[0])) if own else {})}


class Graphs:
    """A network's graphs, and what runs them.

    Attributes:
        arrays: copies of the parameters that have run.

    Args:
        keep: names of nodes that stay float32, besides those that the network keeps.
        is_float32: for the reference, which has the casts of no policy.
        watch: whether the engine counts what the nodes compute.
        samples: of what is watched, the engine takes samples, and counts nothing.
        own: runs the network's own parameters.
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
        # a module's heads begin gradients by themselves: this reaches them as in its own graph
        self.scale = mx.nd.ones(1) if session.is_module else None

    # ---- graphs

    def typed(self) -> List[Tuple[Graph, Dict[str, str]]]:
        """The graphs with their casts, and their variables' types."""
        return [self._typed(of) for of in self.session.graphs.values()]

    def _types(self, of: BlockGraph) -> Dict[str, str]:
        """The types of the parameters that a graph reads. What `keep=` does to those of a kept node
        depends on whether it names the node or the block."""
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
                            () if self.policy.is_float32 else self.keep, wide), known

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.typed(), self.policy, self.session.parameters, self.keep)

    @cached_property
    def tensors(self) -> List[Tensor]:
        return self.layout.tensors()

    def make(self, block: Block, key: Any, arrays: List[Any]) -> Op:
        """Stands in for a block's CachedOp."""
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
        """A parameter's copy, with a gradient if it trains."""
        if name not in self.arrays:
            parameter = self.session.parameters[name]
            value = parameter.data()
            made = self.arrays[name] = (to_float32(value) if dtype == "float32" else value).copy()
            if parameter.grad_req != "null":
                made.attach_grad()
        return self.arrays[name]

    def restore(self, values: Optional[Dict[str, Any]] = None) -> None:
        """Gives the copies the values that the parameters have now, or those given."""
        for of in self.session.graphs.values():
            for name, dtype in self._types(of).items():
                self._copied(name, dtype)
        given = [self.session.parameters[name].data() if values is None else values[name]
                 for name in self.arrays]
        copy_into([array.as_nd_ndarray() for array in self.arrays.values()],
                  [value.as_nd_ndarray() for value in given])

    def gradients(self) -> List[Any]:
        """The gradients of the parameters that train, as the last run left them."""
        return [array.grad for array in self.arrays.values() if array.grad is not None]

    # ---- a step

    def run(self, batch: Batch, scale: float = 1.0) -> Ran:
        """One forward and one backward pass; no update."""
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
        """A step at this loss scale, or at lower ones while only gradients overflow.

        Args:
            prepare: called before each run, to give copies their values, and to draw the same
                random numbers.
            goes_forward: whether nothing overflows before the loss.
        """
        for at in (scale, *lower_scales(scale, SMALLEST_SCALE)):
            prepare()
            ran = self.run(batch, at)
            if ran.finite or not (math.isfinite(ran.loss) and goes_forward(ran)):
                break
        return ran


# ---- batches, and the network's call ------------------------------------------------------------


def split(batch: Batch) -> Tuple[List[Any], List[Any]]:
    """A batch as what the network takes, and what the loss takes besides its output."""
    parts = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    if not parts or not all(isinstance(array, mx.nd.NDArray) and array.size
                            for array in arrays_of(parts)):
        raise ValueError("a batch is a tuple of arrays that are not empty: data, and label last, "
                         "which may be a list of arrays. "
                         f"Received: {[getattr(p, 'shape', type(p).__name__) for p in parts]}")
    return (parts, []) if len(parts) == 1 else (parts[:-1], parts[-1:])


def arrays_of(parts: Any) -> List[Any]:
    """What is in a batch; several labels are a list at its end."""
    *first, last = parts
    several = bool(first) and isinstance(last, (list, tuple)) and len(last) > 0
    return [*first, *(last if several else [last])]


def first_of(batches: Iterable[Batch], count: int, who: str) -> List[Any]:
    """The first batches, so many at most."""
    try:
        given = iter(batches)
    except TypeError:
        raise TypeError("batches is a list of tuples (data, label), or anything that gives such. "
                        f"Received: {type(batches).__name__}") from None
    found = list(itertools.islice(given, count))
    if not found:
        raise ValueError(f"{who} needs at least one batch. Received: none")
    return found


def check(net: Network, batch: Batch) -> None:
    """Refuses what cannot be looked into."""
    blocks = list(blocks_in(net)) if isinstance(net, ConvertedBlock) else []
    if not any(isinstance(b, ConvertedHybridBlock) for b in blocks):
        raise TypeError("xray takes a network that gluon_amp.convert has converted, with a "
                        "HybridBlock in it, whose graph it looks into. "
                        f"Received: {type(net).__name__}")
    if net._amp.policy.is_float32:
        raise ValueError("the network is all float32: convert it with another policy")
    own = [name for b in blocks if not isinstance(b, mx.gluon.HybridBlock) for name in b.params]
    if own:
        raise ValueError("xray looks into graphs, and a plain Block has parameters of its own: "
                         f"move them into a HybridBlock. Received: {', '.join(own[:5])}")
    if any(array.context.device_type == "gpu" for array in split(batch)[0]):
        raise ValueError("xray runs on CPUs, where each result is seen before it is rounded. "
                         "Received: data on a GPU")


def loss_of(net: Network, batch: Batch, loss_fn: LossFunction) -> Array:
    """The loss of a batch."""
    data, label = split(batch)
    output = outputs_of(net, data)
    try:
        loss = loss_fn(output, *label)
    except (mx.MXNetError, TypeError) as error:
        shapes = [getattr(a, "shape", type(a).__name__) for a in [output, *label]]
        raise ValueError(f"loss_fn does not take this output and label: {message(error)}. batches "
                         f"is a list of tuples (data, label). Received: {shapes}") from error
    if not isinstance(loss, mx.nd.NDArray):
        raise TypeError("loss_fn(output, label) is to return one array. Received: "
                        f"{type(loss).__name__}")
    return loss


def mean_and_total(loss: Array) -> Tuple[float, float]:
    """Of a loss's numbers: their mean, and the sum of their sizes."""
    loss = loss.as_nd_ndarray().astype("float32", copy=False)
    return float(loss.mean().asscalar()), float(np.abs(loss.asnumpy()).sum(dtype=np.float64))


# ---- a trainer's own steps, and what is added to parameters -------------------------------------


@dataclass
class Weight:
    """A parameter: its numbers, and its updates.

    Attributes:
        counts: of its numbers, in the last step.
        updates: of what the steps added to it; None without a trainer.
        without_master: the share of these that would have changed nothing in float16 alone; None
            without a trainer, and of a float16 parameter without a master: it has lost them.
        format: the format that the parameter has.
    """
    name: str
    counts: Counts
    updates: Optional[Counts] = None
    without_master: Optional[float] = None
    format: Format = FLOAT32


def check_trainer(trainer: GluonTrainer, net: Network) -> None:
    """Refuses what can take no step of a network."""
    if isinstance(net, mx.mod.BaseModule):
        raise TypeError("of a Module, an X-ray makes steps on copies: trainer= is for Gluon")
    if not isinstance(trainer, mx.gluon.Trainer):
        raise TypeError("trainer is a gluon_amp.Trainer, or MXNet's. "
                        f"Received: {type(trainer).__name__}")
    own = {id(p) for p in net.collect_params().values()} if hasattr(net, "collect_params") else ()
    if not any(id(parameter) in own for parameter in trainer._params):
        raise ValueError("the trainer has none of the network's parameters")
    if isinstance(trainer, Trainer) and trainer._step.begun:
        raise ValueError("gradients wait for the trainer's step: take it before the X-ray, each "
                         "look of which is a step")


class Updates:
    """The parameters, and what a trainer's steps add to them.

    Attributes:
        gave_up: what the trainer said when it took no step any more; "" until then.
    """

    def __init__(self, session: Session, trainer: Optional[GluonTrainer] = None,
                 batch_size: Optional[int] = None) -> None:
        self.session, self.batch_size = session, batch_size
        self.trainer: Any = trainer
        self.parameters = [p for p in session.parameters.values()
                           if p.grad_req != "null" and p._stype == "default"]
        self.added: Dict[str, library.Updates] = defaultdict(library.Updates)  # by all steps
        self.watched = Graphs(session, own=True)
        self.gave_up = ""
        self.last: Dict[str, np.ndarray[Any, Any]] = {}  # the parameters after the last step

    def step(self, batch: Batch) -> Ran:
        """The user's own step, watched."""
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
            self.trainer.after_pass = passed
            try:
                self.trainer.backward(loss)
            finally:
                self.trainer.after_pass = None
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
        scale, backward = [one for one in passes if one[0]][-1]  # a look at heads begins with 0
        mean, total = mean_and_total(loss)
        return Ran(scale, mean, True, both_ways(passes[0][1], backward), total)

    def count(self, values: Dict[str, Any]) -> None:
        """Counts what was added to parameters since they were what `last` has."""
        library.count_updates([*values.values()], [self.last[name] for name in values],
                              [self.added[name] for name in values])

    def _value(self, parameter: Any) -> Any:
        """A parameter's master, or itself where it has none."""
        return _wide(parameter.data(), self._master(parameter))

    def _master(self, parameter: Any) -> Array:
        return _master_of(self.trainer._updaters[0], self.trainer._param2idx.get(parameter.name),
                          parameter.data())

    def weights(self) -> List[Weight]:
        """What was counted."""
        made = []
        for p in self.parameters:
            added, half = self.added.get(p.name), is_half(p.data().dtype)
            made.append(Weight(p.name, Counts.of_array(to_float32(p.data())),
                               format=FORMATS[dtype_name(p.data().dtype)]))
            if added is not None:
                made[-1].updates = Counts.of_structure(added.counts)
                if not half or self._master(p) is not None:  # float16 alone loses some of them
                    made[-1].without_master = added.lost / max(added.changed, 1)
        return made


class ModuleUpdates(Updates):
    """The parameters of a Module, and what its optimizer would add to them, each update from the
    parameters, masters and states of now; nothing where it has none, or where servers have it."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.module = bound_module(session.net.module)
        self.masters: Dict[str, Any] = {}  # of the last step
        self.updater: Any = None
        if self.module.optimizer_initialized:
            on_store = self.module._update_on_kvstore
            self.updater = (self.module._kvstore if on_store else self.module)._updater

    def would_add(self, graphs: Graphs, scale: float) -> None:
        """Counts what would be added by the gradients that a run at this loss scale has left."""
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
        fitting = getattr(self.session.net.module, "_fitting_states", None)  # of a file, unused yet
        made.set_states(self.updater.get_states())
        if fitting:
            made.states = copy.deepcopy(fitting[1])
            made.states_synced = dict.fromkeys(made.states, False)
        return made

    def _clipped(self, gradients: List[Any], factor: float) -> float:
        """What `clip_norm` multiplies with gradients that the optimizer gets times a factor."""
        steps = getattr(self.session.net.module, "_step", None)
        if steps is None or steps.max_norm is None:
            return 1.0
        norm = math.sqrt(float(squares(gradients).sum())) * factor
        return min(steps.max_norm / norm, 1.0) if norm else 1.0

    def _master(self, parameter: Any) -> Array:
        return self.masters.get(parameter.name)


def _wide(weight: Array, master: Array) -> Array:
    """A weight in float32: its master, or itself where it has none."""
    return to_float32(weight) if master is None else master


def _master_of(updater: Any, index: Any, weight: Array) -> Array:
    return master_in(updater.optimizer, updater.states.get(index)) \
        if is_half(weight.dtype) else None
