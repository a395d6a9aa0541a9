"""Converted blocks, which run their graph with casts.

`convert` changes the class of each block to a subclass, created here. Under a float32 policy, only
its files and new children differ from MXNet's, not its steps. Under the others, the traced graph
(`_cached_graph`, which `export` reads) is MXNet's. Only the `CachedOp` differs: it has that graph
with the policy's casts and settings, one for each kind of device and input types.

MXNet traces a hybridized block once, but the user may not have hybridized it. So a converted block
is traced again if MXNet's mode (recording, training) or the number of arguments changes. The same
applies if a block in it gets a new child, is converted or is restored.
"""
import copy
import copyreg
import functools
import inspect
import logging
import os
import re
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
)
from weakref import WeakKeyDictionary, WeakSet

from mxnet import autograd
from mxnet.base import NotImplementedForSymbol
from mxnet.gluon.block import _BlockScope, _flatten, _regroup

from .._mxnet import GRAPH_LOCK, mx
from ..annotations import Array, Block, Context, Network, Parameter, Symbol
from ..checks import listed
from ..cpu import library
from ..cpu.arrays import dtype_name, is_16bit
from ..files import replace_file
from ..graph.build import (
    FINITE_AVERAGES,
    build,
    cached_op,
    check_device,
    check_trains_on_cpus,
    devices_that_wait,
    keep_averages_finite,
)
from ..graph.casts import SPARSE, STORAGE, insert_casts
from ..graph.channels_last import channels_last
from ..graph.graph import Graph
from ..graph.keep import Kept, operator_names
from ..graph.norms import fuse_norms
from ..policy import Policy
from ..record import Record, put_record, save_arrays
from ..training.masters import trainers_of
from .parameter import cast, complete_copy, constant_fits, value_of
from .records import check_file, float32_numbers, record_of, write_masters

log = logging.getLogger("gluon_amp")

# MXNet's names of shared and of pinned CPU memory
_OTHER_CPUS = ("cpu_shared", "cpu_pinned")

# MXNet's engine runs up to this many operators of a training step as one task on a GPU, unless
# flags of hybridize() or MXNet's variables set another number. The GPU waits for the host after
# each task. MXNet's default, 15, starts sums of gradients over devices early in the backward pass.
_IN_BULK, _BULK = 100, "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"

_DATA = mx.gluon.Parameter.data

# Held while a block is traced and its CachedOp selected: several threads may call one block.
_CACHED_OP_LOCK = threading.RLock()

# The converted networks whose traces contain a block.
_TRACED_IN: "WeakKeyDictionary[Any, WeakSet[Any]]" = WeakKeyDictionary()


Op = Tuple[Any, List[Any]]  # a CachedOp, and the sources of its inputs


@dataclass
class Trace:
    """A graph that MXNet has traced, and its CachedOps."""
    graph: Any  # MXNet's _cached_graph: the symbols of inputs and outputs
    clean: Graph  # the same as a Graph
    in_format: Any
    out_format: Any
    # by (the device: "cpu", "gpu" or "gpu in training", whether a hook reads the tensors, the
    # inputs' types)
    ops: Dict[Tuple[str, bool, Tuple[str, ...]], Op] = field(default_factory=dict)
    kept: FrozenSet[str] = frozenset()  # nodes of blocks and operators in keep=
    devices: int = 1  # devices that synchronize in training

    def is_alike(self, other: "Trace") -> bool:
        """Whether both graphs compute the same; names of operators may differ."""
        mine, theirs = (t.clean.structure(t.kept) for t in (self, other))
        return (self.in_format, self.out_format) == (other.in_format, other.out_format) \
            and mine == theirs


@dataclass
class State:
    """The state of a converted block."""
    policy: Policy
    converted_to: Policy  # by `convert`; `policy` differs if the block runs imperatively
    active: bool  # whether the restored block is hybridized
    keep: bool  # whether keep= has this block or one around it
    kept: Kept  # the nodes and operators in keep=
    convert_child: Callable[[Any], None]  # converts a new child
    compares: bool  # whether files must have the same policy and keep=
    # by (whether MXNet records, whether it trains, the nesting of the arguments): a forward may
    # depend on each
    traces: Dict[Tuple[bool, bool, str], Trace] = field(default_factory=dict)
    # set by an X-ray: takes the block, (whether it is on a GPU, the types of the data) and the data
    stand_in: Optional[Callable[..., Op]] = None
    # called with the names of the nodes that the block creates
    recorders: Tuple[Callable[[str], object], ...] = ()

    def record(self, name: str) -> None:
        for recorder in self.recorders:
            recorder(name)


def _recording() -> ContextManager[Any]:
    """Lets one thread at a time record a graph."""
    return GRAPH_LOCK if autograd.is_recording() else nullcontext()


def discard_traces(block: Block) -> None:
    """Discards the traces that contain a block, because it changes."""
    with _CACHED_OP_LOCK:
        for net in list(_TRACED_IN.pop(block, ())):
            net._clear_cached_op()


def traced_blocks() -> List[Any]:
    """Returns the converted blocks that have traced graphs."""
    with _CACHED_OP_LOCK:
        return list({net for nets in _TRACED_IN.values() for net in nets})


class PolicyBlock:
    """The base of the blocks of converted networks, of all policies: children, copies and files.

    It precedes the user's class. Blocks of a float32 policy run MXNet's code.
    """

    _amp: State
    _cached_graph: Any

    def __init_subclass__(cls) -> None:
        """Skips the user's hook, which has run for the original class and may require arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Creates a block of the original class for `type(net)(...)`."""
        return original_class(cls)(*args, **kwargs)

    def register_child(self, block: Block, name: Optional[str] = None) -> None:
        super().register_child(block, name)
        self._amp.convert_child(block)
        discard_traces(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Supports pickle and copy. Graphs are left out and traced again."""
        make, arguments, state, *rest = super().__reduce_ex__(max(int(protocol), 2))
        if make is not copyreg.__newobj__ or not isinstance(state, dict):
            raise TypeError(f"{type(self).__name__} defines its own pickling: restore the network "
                            "first")
        state = {**state, "_amp": replace(self._amp, traces={}, stand_in=None, recorders=())}
        if isinstance(self, mx.gluon.HybridBlock):
            state.update(_cached_op=None, _cached_op_args=[])
            if not isinstance(self, mx.gluon.SymbolBlock):  # which is its graph
                state.update(_cached_graph=())
        return (_empty_block, (original_class(type(self)), isinstance(self, ConvertedBlock),
                               *arguments[1:]), state, *rest)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        fill = getattr(super(), "__setstate__", self.__dict__.update)  # the user's own, or Python's
        fill(state)
        if isinstance(self, mx.gluon.SymbolBlock) and mx.util.is_np_array():
            inputs, symbol = self._cached_graph  # MXNet unpickles symbols of numpy mode as others
            self._cached_graph = [i.as_np_ndarray() for i in inputs], symbol.as_np_ndarray()
        for parameter in self.params.values():
            complete_copy(parameter)

    def save_parameters(self, filename: str, deduplicate: bool = False,
                        masters: Any = None) -> None:
        """Saves the parameters as float32 arrays, which a float32 network loads too, and FILE.json,
        a record of the policy and `keep=`. 16-bit parameters have rounded values.

        Args:
            filename: the path of the file.
            deduplicate: whether a shared parameter is saved once.
            masters: a Trainer, or a list of Trainers: saves their master weights, which are not
                rounded.
        """
        parameters = self._collect_params_with_prefix()
        if deduplicate:
            last = {p: name for name, p in parameters.items()}
            parameters = {name: p for p, name in last.items()}
        numbers = float32_numbers(self, masters)
        save_arrays(filename, {name: numbers(p) for name, p in parameters.items()},
                    record_of(self))

    def load_parameters(self, filename: str, ctx: Optional[Context] = None,
                        allow_missing: bool = False, ignore_extra: bool = False,
                        cast_dtype: bool = True, dtype_source: str = "current",
                        masters: Any = None) -> None:
        """Loads float32 or 16-bit files and keeps the types of the parameters.

        Args:
            filename, ctx, allow_missing, ignore_extra, cast_dtype, dtype_source: as in MXNet.
            masters: a Trainer, or a list of Trainers: their master weights get the file's numbers,
                which the weights have in rounded form.

        Raises:
            ValueError: the file's record has another policy, or keeps more in float32.
        """
        trainers = trainers_of(masters, self)
        if self._amp.compares:
            check_file(self, filename)
        super().load_parameters(filename, ctx, allow_missing, ignore_extra, cast_dtype,
                                dtype_source)
        write_masters(self, filename, trainers)


class PolicyHybridBlock(PolicyBlock):
    """The base of the HybridBlocks of converted networks; it precedes the user's class."""

    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = True,
               masters: Any = None) -> None:
        """Writes PATH-symbol.json and PATH-EPOCH.params, which any MXNet loads. Both record the
        policy and `keep=`: an attribute of the symbol, and PATH-EPOCH.params.json.

        The graph is the one that ran last, in training or in prediction. Values of 16-bit
        parameters are rounded ones, in float32 arrays.

        Args:
            path: the path without its suffix.
            epoch: the number in the name of the parameters' file.
            remove_amp_cast: True writes the float32 network. False writes the casts, and
                parameters in their own types. Valid under float32 and float16 policies.
            masters: a Trainer, or a list of Trainers: writes their master weights, which are not
                rounded. Valid with remove_amp_cast=True.
        """
        if masters is not None and not remove_amp_cast:
            raise ValueError("masters= writes float32 parameters, and remove_amp_cast=False writes "
                             "them in their own types: leave out one of both")
        symbol, kept = self._to_export(remove_amp_cast)
        kinds = {**dict.fromkeys(symbol.list_arguments(), "arg"),
                 **dict.fromkeys(symbol.list_auxiliary_states(), "aux")}
        numbers = float32_numbers(self, masters) if remove_amp_cast else value_of
        arrays = {f"{kinds[name]}:{name}": numbers(parameter)
                  for name, parameter in self.collect_params().items() if name in kinds}
        save_arrays(f"{path}-{epoch:04d}.params", arrays, record_of(self, kept))
        replace_file(f"{path}-symbol.json",
                     lambda p: symbol.save(p, remove_amp_cast=remove_amp_cast))

    def _to_export(self, remove_amp_cast: bool) -> Tuple[Symbol, List[str]]:
        """Returns the symbol that `export` writes, and its nodes that stay float32 by `keep=`."""
        low = [block.name for block in blocks_in(self) if isinstance(block, ConvertedBlock)]
        if low:
            raise ValueError("export writes a network of one policy, and these parts of "
                             f"{self.name}, which is {self._amp.converted_to.name}, have another: "
                             f"{listed(low)}. Valid: export of each part, or gluon_amp.convert "
                             "of the whole network")
        return (self._cached_graph or self._graph_of_inputs())[1], []

    def _graph_of_inputs(self) -> Any:
        """Returns MXNet's graph of a block that was not hybridized. Each call must have the same
        inputs: those of another call could make another graph."""
        inputs, is_fixed = inputs_of(self)
        if is_fixed and not self._active:
            one = (mx.np if mx.util.is_np_array() else mx.nd).ones(1)
            try:
                self._get_graph(*[one] * len(inputs))
                return self._cached_graph
            except NOT_TRACED as error:
                log.debug("%s cannot be traced: %r", self.name, error)
            finally:
                self._clear_cached_op()
        first = "" if self._active else f"call {self.name}.hybridize(), and "
        raise RuntimeError(f"export needs the graph: {first}run {self.name} on data once first")


class Float32HybridBlock(PolicyHybridBlock):
    """The base of the HybridBlocks of float32 policies. They run MXNet's code, but their moving
    averages stay finite: a step that is skipped changes nothing for good."""

    def _get_graph(self, *args: Any) -> Any:
        """Returns MXNet's graph, for its CachedOp with settings; `export` writes it without."""
        data, symbol = super()._get_graph(*args)
        graph = Graph.read(symbol)
        with_settings = not self._backend and keep_averages_finite(graph)
        return data, graph.symbol(like=symbol) if with_settings else symbol


class Float32Norm(Float32HybridBlock):
    """The base of the batch norms of float32 policies."""

    def hybrid_forward(self, F: Any, x: Array, *args: Any, **parameters: Any) -> Any:
        norm = self
        if isinstance(x, mx.nd.NDArray) and library.started():  # without a graph
            norm = object.__new__(original_class(type(self)))
            vars(norm).update(vars(self), _kwargs={
                **self._kwargs, library.SETTINGS: library.settings_attribute(FINITE_AVERAGES)})
        return original_class(type(self)).hybrid_forward(norm, F, x, *args, **parameters)


def inputs_of(block: Any) -> Tuple[List[str], bool]:
    """Returns the names of the arrays that a HybridBlock requires, and whether each call has these
    alone."""
    sequential = mx.gluon.nn.HybridSequential.hybrid_forward
    while type(block).hybrid_forward is sequential and block._children:
        block = next(iter(block._children.values()))
    signature = inspect.signature(original_class(type(block)).hybrid_forward)
    inputs = [each for each in list(signature.parameters.values())[2:]
              if each.name not in block._reg_params]
    required = [each.name for each in inputs
                if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty]
    return required, len(required) == len(inputs)


class ConvertedBlock(PolicyBlock):
    """The base of all blocks in mixed precision; it precedes the user's class."""

    def summary(self, *inputs: Array) -> None:
        """Prints the summary of the float32 network."""
        net = copy.deepcopy(self)
        restore_blocks(blocks_in(net))
        for parameter in net.collect_params().values():
            if is_16bit(parameter.dtype):
                cast(parameter, "float32")
        net.summary(*inputs)


class ConvertedHybridBlock(PolicyHybridBlock, ConvertedBlock):
    """The base of HybridBlocks in mixed precision; it precedes the user's class."""

    _cached_op_args: List[Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = _map_arrays(_on_plain_cpu, args)
        traced = any(isinstance(a, mx.sym.Symbol) for a in args)
        if traced:
            self._check_caller()
        elif not self._active:
            args = _map_arrays(_to_float32, args)
        try:
            if traced and isinstance(self, mx.gluon.SymbolBlock):  # its nodes have their names
                for name in operator_names(Graph.read(self._cached_graph[1])):
                    self._amp.record(name)
                if isinstance(self._cached_graph[1], mx.sym.numpy._Symbol):
                    return self._compose(args)
            return super().forward(*args, **kwargs)
        except _ONLY_ARRAYS as error:
            vars(error).setdefault(_BLOCK, self)  # the innermost, which reads a symbol as an array
            raise
        except _NotTraceable as no_graph:
            self._run_imperatively(no_graph)
        return self.forward(*args, **kwargs)

    def _compose(self, args: Tuple[Any, ...]) -> Any:
        """As `SymbolBlock.forward`, which fails with a symbol of numpy mode of one output, and
        writes into one of several."""
        data, symbol = self._cached_graph
        inputs, structure = _flatten(list(args), "input")
        if structure != self._in_format:
            raise ValueError(f"{self.name} takes {len(data)} inputs: "
                             f"{', '.join(d.name for d in data)}. Received: {len(inputs)}")
        composed = copy.copy(symbol.as_nd_ndarray())
        composed._compose(**{d.name: x.as_nd_ndarray() for d, x in zip(data, inputs)})
        return _regroup([output.as_np_ndarray() for output in composed], self._out_format)

    def name_scope(self) -> Any:
        """Returns the scope of the block's names. During a trace, it records them."""
        scope = super().name_scope()
        return _recorded(scope, self._amp.record) if self._amp.recorders else scope

    def _run_imperatively(self, why: Exception) -> None:
        """Makes the block imperative and float32, because a block in keep= cannot be traced.
        Its children run as separate graphs, as those of a plain Block do, and return float32."""
        log.info("%s runs imperatively in float32: a block in keep= cannot be traced (%s)",
                 self.name, why.__cause__)
        self._active = False
        for parameter in self._reg_params.values():
            if is_16bit(parameter.dtype):
                cast(parameter, "float32")
        for state in _states(self):
            state.policy = replace(state.policy, output="float32")
            state.traces.clear()

    def _check_caller(self) -> None:
        """Refuses a hybridized caller that is not converted: its graph would have no casts."""
        scope = getattr(_BlockScope._current, "value", None)
        caller = getattr(scope, "_block", None)
        if isinstance(caller, mx.gluon.HybridBlock) and caller._active \
                and not isinstance(caller, ConvertedBlock):
            raise RuntimeError(f"{self.name} is converted, but its caller {caller.name} is "
                               "hybridized and not converted. Convert the outermost block, and "
                               "list in keep= what stays float32")

    def hybridize(self, active: bool = True, backend: Optional[str] = None, *args: Any,
                  **kwargs: Any) -> None:
        check_backend(backend)
        if not active:
            log.info("%s stays hybridized: float16 runs as a graph. gluon_amp.restore(net) "
                     "undoes it.", self.name)
        before = [(block, block._active) for block in blocks_in(self) if not active]
        super().hybridize(True, None, *args, **kwargs)
        for block, was_active in before:
            block._active = was_active
        for state in _states(self):
            state.active = active

    def infer_type(self, *args: Array) -> None:
        """Does nothing: `convert` has set the parameters' types."""

    def _clear_cached_op(self) -> None:
        self._amp.traces.clear()
        super()._clear_cached_op()

    def _trace(self, *args: Any) -> Trace:
        """Traces the graph into `_cached_graph` and initializes the parameters."""
        parameters = parameters_in(self)
        if not isinstance(self, mx.gluon.SymbolBlock):  # which is its graph
            self._cached_graph = ()
        kept: Set[str] = set()
        with recording_names(blocks_kept(self), kept.add):
            self._get_symbols(*args)
        arrays = [a for a in _flatten(args, "input")[0] if a is not None]
        for i, storage in storage_types(arrays).items():
            self._cached_graph[0][i]._set_attr(**{STORAGE: SPARSE[storage]})
        clean = Graph.read(self._cached_graph[1])
        for name in clean.mutated() & parameters.keys():
            _keep_float32(parameters[name])
        if any(p._deferred_init for p in parameters.values()):
            self._deferred_infer_shape(*args)
            for name in self._cached_graph[1].list_inputs():  # MXNet's order of random numbers
                if name in parameters:
                    parameters[name]._finish_deferred_init()
        if self._amp.keep:
            kept |= operator_names(clean)
        elif any(self._amp.kept):
            kept |= self._amp.kept.in_graph(clean)
        return Trace(self._cached_graph, clean, self._in_format, self._out_format,
                     kept=frozenset(kept), devices=devices_that_wait(clean))

    def _get_symbols(self, *args: Any) -> None:
        """Traces the block. A network that was never hybridized may read shapes or values."""
        try:
            self._get_graph(*args)
        except _ONLY_ARRAYS as error:
            block = vars(error).pop(_BLOCK, self)
            if block._amp.keep and not (block._amp.active or self._amp.active):
                raise _NotTraceable from error
            kind, names = type(block).__name__, [each.name for each in blocks_in(self)]
            kept = repr(re.escape(block.name)) if block.name and names.count(block.name) == 1 \
                else kind
            hybridized = "is hybridized" if self._amp.active else "was never hybridized"
            without = ", without hybridize()" if self._amp.active else ""
            raise RuntimeError(
                f"{name_of(self)} {hybridized}, and cannot be traced to a graph, which a converted "
                f"network requires. The hybrid_forward of {name_of(block)} "
                f"({kind}), or a hook of a block in it, reads shapes or values, or takes arrays "
                "only: "
                f"{str(error).strip(' .') or type(error).__name__}. Valid{without}: "
                f"amp.convert(net, keep=[{kept}]), which runs this block and those around it "
                "imperatively in float32, or a plain gluon.Block, whose children are converted"
            ) from error

    def _call_cached_op(self, *args: Any) -> Any:
        given, structure = _flatten(args, "input")
        arrays = [a for a in given if a is not None]
        with _CACHED_OP_LOCK:
            op, inputs = self._op_for(structure, arrays, args)
            vars(self).update(_cached_op=op, _cached_op_args=inputs)
            out_format = self._out_format
            if self._callback:
                with _recording():
                    return super()._call_cached_op(*args)
        with _recording():
            out = op(*_inputs_of(inputs, arrays))
        return _regroup(out if isinstance(out, list) else [out], out_format)

    def _op_for(self, structure: str, arrays: List[Any], args: Sequence[Any]) -> Op:
        """Returns the CachedOp for MXNet's current mode and for these arguments."""
        trace = self._use_trace(f"{structure}{storage_types(arrays) or ''}", *args)
        # MXNet's `forward` has set the current device to the first array's
        device = mx.context.current_context().device_type
        on_gpu, types = device == "gpu", tuple([dtype_name(a.dtype) for a in arrays])
        if trace.devices > 1 and autograd.is_training() and not on_gpu:
            check_trains_on_cpus(trace.devices)
        if self._amp.stand_in is not None:
            return self._amp.stand_in(self, (on_gpu, types), arrays)
        # Predictions on an H200 were slower with their channels last.
        where = "gpu in training" if on_gpu and autograd.is_training() else device
        is_hooked = bool(self._callback)
        key = where, is_hooked, types
        if key not in trace.ops:
            graph, declared = self.mixed_graph(types, trace.clean)
            trace.ops[key] = make_op(
                self, graph, declared, self._amp.policy, [d.name for d in trace.graph[0]],
                parameters_in(self), self._flags, on_gpu, not is_hooked and where != "gpu")
        return trace.ops[key]

    def _use_trace(self, structure: str, *args: Any) -> Trace:
        """Sets the block's graph to that of MXNet's current mode, and traces it if necessary."""
        state = self._amp
        # set by MXNet's RNN layers in each call: whether it has no states, and so returns none
        skips = getattr(self, "skip_states", None)
        mode = autograd.is_recording(), autograd.is_training(), f"{structure} {skips}"
        if mode not in state.traces:
            trace = self._trace(*args)
            there = {*parameters_in(self), *(d.name for d in trace.graph[0])}
            if not state.traces and there != set(trace.clean.variables()):
                super()._build_cache(*args)  # raises, or warns of unused parameters
            for block in blocks_in(self):
                _TRACED_IN.setdefault(block, WeakSet()).add(self)
            alike = (t for t in state.traces.values() if trace.is_alike(t))
            state.traces[mode] = next(alike, trace)
        trace = state.traces[mode]
        # bypasses MXNet's __setattr__, which takes several microseconds
        vars(self).update(_cached_graph=trace.graph, _in_format=trace.in_format,
                          _out_format=trace.out_format)
        return trace

    def mixed_graph(self, dtypes: Iterable[str],
                    clean: Optional[Graph] = None) -> Tuple[Graph, Dict[str, str]]:
        """Returns the graph with casts for inputs of these types, and its variables' types."""
        data, traced = self._cached_graph
        types = {name: dtype_name(p.dtype) for name, p in parameters_in(self).items()}
        types.update(zip((d.name for d in data), dtypes))
        return self.with_casts(clean or Graph.read(traced), types), types

    def kept_nodes(self) -> FrozenSet[str]:
        """Returns the nodes of the current graph that stay float32 by `keep=`."""
        of_trace = [trace.kept for trace in self._amp.traces.values()
                    if trace.graph is self._cached_graph]
        return frozenset().union(*of_trace, *(state.kept.nodes for state in _states(self)))

    def with_casts(self, clean: Graph, types: Mapping[str, str],
                   also: Iterable[str] = ()) -> Graph:
        """Returns a traced graph with casts for variables of these types.

        `also` names nodes that stay float32 besides those of `convert`.
        """
        keep = self.kept_nodes().union(also)
        policy, parameters = self._amp.policy, parameters_in(self)
        wide = wide_constants(parameters, policy)
        return insert_casts(clean, types, policy, parameters, keep, wide)

    def _to_export(self, remove_amp_cast: bool) -> Tuple[Symbol, List[str]]:
        if not self._cached_graph or not self._cached_op_args:
            raise RuntimeError(f"export needs the graph: run {self.name} on data once first")
        policy = self._amp.policy
        if not remove_amp_cast and policy.cpu_only:
            raise ValueError("MXNet's files support float16 and float32 only. Valid "
                             f"under policy {policy.name}: remove_amp_cast=True, which writes the "
                             "float32 network")
        data, clean = self._cached_graph
        graph = Graph.read(clean)
        if not remove_amp_cast:
            graph, _ = self.mixed_graph(["float32"] * len(data))
        for node in graph.nodes() if remove_amp_cast else ():
            if node.is_variable:
                node.attrs.pop("__dtype__", None)
        kept = sorted(self.kept_nodes() & operator_names(Graph.read(clean)))
        put_record(graph, Record({"": self._amp.converted_to}, nodes=tuple(kept)))
        return graph.symbol(), kept


def _inputs_of(sources: Iterable[Tuple[bool, Any]], data: Sequence[Array]) -> List[Array]:
    """Returns the inputs of a CachedOp. `Parameter.data` takes a microsecond, so it is not called
    for a dense parameter on one device."""
    arrays = []
    for is_data, source in sources:
        if is_data:
            arrays.append(data[source])
        elif getattr(type(source), "data", None) is _DATA and source._stype == "default" \
                and source._data is not None and len(source._data) == 1:
            arrays.append(source._data[0])
        else:
            arrays.append(source.data())
    return arrays


def make_op(block: Block, graph: Graph, types: Mapping[str, str], policy: Policy,
            data: Sequence[str], parameters: Mapping[str, Any], flags: Iterable[Any],
            on_gpu: bool = False, layouts: bool = False, **settings: Any) -> Op:
    """Returns the CachedOp of a block's graph.

    The CachedOp returns numpy arrays if the block was traced in numpy mode.

    Args:
        graph: the block's graph with casts.
        types: the dtype of each variable.
        policy: the policy of the casts.
        data, parameters, flags: as in `cached_op`.
        on_gpu: whether it runs on a GPU.
        layouts: whether images within the graph may have another layout.
        settings: further arguments of `build`.
    """
    check_device(graph, policy, on_gpu)
    if on_gpu and layouts:
        graph = channels_last(graph, types, {name: p.shape for name, p in parameters.items()})
    built = build(graph, types, policy, layouts=layouts, **settings)
    if on_gpu and layouts:
        built = fuse_norms(built, types)
    symbol = built.symbol(like=block._cached_graph[1])
    flags = dict(flags)
    if on_gpu and flags.get("static_shape") and not any(_BULK in name for name in os.environ):
        flags = {"forward_bulk_size": _IN_BULK, "backward_bulk_size": _IN_BULK, **flags}
    return cached_op(symbol, data, parameters, flags.items())


def wide_constants(parameters: Mapping[str, Any], policy: Policy) -> List[str]:
    """Returns the names of constants that the policy's activations cannot represent."""
    return [name for name, p in parameters.items()
            if isinstance(p, mx.gluon.Constant) and not constant_fits(p, policy.compute)]


def name_of(block: Block) -> str:
    """Returns the name of a block, for messages; of one without a name, its class."""
    return block.name or f"a {type(block).__name__} without a name"


def blocks_in(net: Network) -> Iterator[Any]:
    """Yields the net and all its descendants, each once, parents first."""
    seen: Set[int] = set()
    stack = [net]
    while stack:
        block = stack.pop()
        if id(block) not in seen:
            seen.add(id(block))
            yield block
            stack.extend(reversed(list(block._children.values())))


@contextmanager
def recording_names(blocks: Iterable[Any], record: Callable[[str], object]) -> Iterator[None]:
    """Calls `record` with the name of each node that these converted blocks create."""
    before = [(block._amp, block._amp.recorders) for block in blocks]
    for state, recorders in before:
        state.recorders = (*recorders, record)
    try:
        yield
    finally:
        for state, recorders in before:
            state.recorders = recorders


def parameters_in(net: Network) -> Dict[str, Any]:
    """Returns the parameters of all of a net's blocks by name, as `collect_params` does."""
    return {name: p for block in blocks_in(net) for name, p in block.params.items()}


def storage_types(arrays: Iterable[Any]) -> Dict[int, str]:
    """Returns the storage types of sparse arrays, by their indices."""
    return {i: array.stype for i, array in enumerate(arrays)
            if isinstance(array, mx.nd.sparse.BaseSparseNDArray)}


def check_backend(backend: Optional[str]) -> None:
    """Refuses a backend, which would partition the float32 graph."""
    if backend:
        raise ValueError("MXNet's backends cannot partition the graph of a converted network. "
                         f"Valid: hybridize() without backend=. Received: {backend!r}")


# Errors of a hybrid_forward that accepts arrays only; and those of one that is traced before its
# first call, when parameters may have no values either.
_ONLY_ARRAYS = (AttributeError, AssertionError, TypeError, ValueError, NotImplementedForSymbol)
NOT_TRACED = (*_ONLY_ARRAYS, LookupError, RuntimeError)


_BLOCK = "block_of_gluon_amp"  # an attribute of such an error


class _NotTraceable(Exception):
    """A block in keep= cannot be traced."""


def _keep_float32(state: Parameter) -> None:
    """Makes a parameter that an operator mutates float32, as MXNet requires. `convert` has left it
    float32, unless it could not trace the block."""
    if is_16bit(state.dtype):
        if state._data is not None:
            log.warning("%s is float32 from now on, because an operator mutates it. Its values "
                        "have been rounded to %s", state.name, dtype_name(state.dtype))
        cast(state, "float32")
        state._differentiable = False


def _map_arrays(function: Callable[[Any], Any], value: object) -> Any:
    """Applies a function to the arrays in nested lists, tuples and named tuples."""
    if isinstance(value, mx.nd.NDArray):
        return function(value)
    if isinstance(value, (list, tuple)):
        mapped = [_map_arrays(function, each) for each in value]
        if all(a is b for a, b in zip(mapped, value)):
            return value
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value


def _to_float32(array: Array) -> Array:
    return array.astype("float32") if is_16bit(array.dtype) else array


def _on_plain_cpu(array: Array) -> Array:
    """Moves an array in shared or pinned memory to the CPU context that a graph requires."""
    if array.ctx.device_type not in _OTHER_CPUS:
        return array
    return array.copyto(mx.cpu(array.ctx.device_id))


class _Names(mx.name.NameManager):
    """Records the names that the enclosing manager gives to nodes."""

    def __init__(self, record: Callable[[str], None]) -> None:
        super().__init__()
        self._record = record

    def get(self, name: Optional[str], hint: str) -> str:
        given: str = self._old_manager.get(name, hint)
        self._record(given)
        return given


@contextmanager
def _recorded(scope: Any, record: Callable[[str], None]) -> Iterator[Any]:
    """Enters a block's scope and records the names that it gives."""
    with scope as entered, _Names(record):
        yield entered


def blocks_kept(net: Block) -> List[Any]:
    """Returns the converted blocks in `keep=`, with the blocks inside them."""
    return [block for block in blocks_in(net)
            if isinstance(block, ConvertedBlock) and block._amp.keep]


def _states(net: Block) -> Iterator[State]:
    return (block._amp for block in blocks_in(net) if isinstance(block, ConvertedBlock))


@functools.lru_cache(maxsize=None)
def converted_class(cls: type, mixed: bool) -> type:
    """Returns the converted subclass of a block's class, for mixed precision or for float32. It has
    the same name."""
    front: Any = ConvertedBlock if mixed else PolicyBlock
    if issubclass(cls, mx.gluon.HybridBlock):
        is_norm = issubclass(cls, mx.gluon.nn.basic_layers._BatchNorm)
        front = ConvertedHybridBlock if mixed else Float32Norm if is_norm else Float32HybridBlock
    contents: Dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__,
                                "__doc__": cls.__doc__}
    if hasattr(cls, "__getitem__"):
        contents["__getitem__"] = _item_or_part
    metaclass: Any = _ConvertedType
    if type(cls) is not type:
        metaclass = type(metaclass.__name__, (metaclass, type(cls)), {})
    return metaclass(cls.__name__, (front, cls), contents)


class _ConvertedType(type):
    """The metaclass of converted classes. Blocks of the original class are instances too, because
    MXNet lets a child be replaced only by an instance of its class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, original_class(cls))


def original_class(converted: type) -> Any:
    """Returns the class from which `converted_class` derived this one."""
    return next(cls for cls in converted.__mro__ if not issubclass(cls, PolicyBlock))


def _item_or_part(self: Any, key: Any) -> Any:
    """Returns a child or, for a slice, a converted block with some of the children."""
    part = original_class(type(self)).__getitem__(self, key)
    if isinstance(part, mx.gluon.Block):
        self._amp.convert_child(part)
    return part


def _empty_block(cls: type, mixed: bool, *args: Any) -> Any:
    """Returns an empty converted block of this class, which pickle and copy fill."""
    block = cls.__new__(cls, *args)
    block.__class__ = converted_class(cls, mixed)
    return block


def restore_blocks(blocks: Iterable[Any]) -> None:
    """Restores the original classes of converted blocks."""
    for block in [b for b in blocks if isinstance(b, PolicyBlock)]:
        discard_traces(block)
        if isinstance(block, ConvertedHybridBlock):
            block._clear_cached_op()
            block._active = block._amp.active
        for parameter in block.params.values():
            parameter.converted_by_gluon_amp = None
        block.__class__ = original_class(type(block))
        del block._amp
