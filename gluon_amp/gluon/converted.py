"""What a converted block does differently: it runs its graph with casts in it.

`convert` gives each block of a network a subclass of its own class, made here.
The traced graph (`_cached_graph`, what `export` reads) stays as MXNet made it.
Only the `CachedOp` differs: it holds that graph with the policy's casts, and on
a CPU with our operators. There is one for each kind of device and input types.
"""
import functools
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, Tuple

from .._mxnet import mx
from ..cpu.arrays import dtype_name, to_float32
from ..files import replace_file
from ..graph.build import build
from ..graph.casts import KEEP, insert_casts
from ..graph.graph import Graph, Node
from ..graph.operators import BATCH_NORMS
from ..policy import Policy

log = logging.getLogger("gluon_amp")


@dataclass
class State:
    """What a converted block remembers."""
    policy: Policy
    active: bool  # whether it was hybridized before
    keep: bool = False  # stays float32
    keep_nodes: FrozenSet[str] = frozenset()  # of a SymbolBlock: nodes that stay float32
    ops: Dict[Any, Tuple[Any, List[Any]]] = field(default_factory=dict)


@contextmanager
def initialized_in_float32(parameters: Iterable["mx.gluon.Parameter"],
                           again: bool = False) -> Iterator[None]:
    """Parameters that are initialized meanwhile draw the values that float32 would.
    `again`: those that have values already, too."""
    half = [p for p in parameters
            if dtype_name(p.dtype) == "float16" and (again or p._data is None)]
    for parameter in half:
        parameter.cast("float32")
    try:
        yield
    finally:
        for parameter in half:
            parameter.cast("float16")


class ConvertedBlock:
    """In front of the class of any converted block."""

    _amp: State

    def initialize(self, init: Any = None, ctx: Any = None, verbose: bool = False,
                   force_reinit: bool = False) -> None:
        with initialized_in_float32(self.collect_params().values(), again=force_reinit):
            super().initialize(init or mx.init.Uniform(), ctx, verbose, force_reinit)

    def save_parameters(self, filename: str, deduplicate: bool = False) -> None:
        """Saves float32, which a float32 network loads too."""
        parameters = self._collect_params_with_prefix()
        if deduplicate:
            last = {p: name for name, p in parameters.items()}
            parameters = {name: p for p, name in last.items()}
        arrays = {name: to_float32(p._reduce()) for name, p in parameters.items()}
        replace_file(filename, lambda path: mx.nd.save(path, arrays))

    def load_parameters(self, filename: str, ctx: Any = None, allow_missing: bool = False,
                        ignore_extra: bool = False, cast_dtype: bool = True,
                        dtype_source: str = "current") -> None:
        """Loads files of either type into the types that the parameters have."""
        super().load_parameters(filename, ctx, allow_missing, ignore_extra, cast_dtype,
                                dtype_source)


class ConvertedHybridBlock(ConvertedBlock):
    """In front of the class of a converted HybridBlock."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._amp.keep:
            with mx.AttrScope(**{KEEP: "True"}):
                return super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def hybridize(self, active: bool = True, *args: Any, **kwargs: Any) -> None:
        if not active:
            log.info("%s stays hybridized: float16 runs as a graph. gluon_amp.restore(net) "
                     "undoes it.", self.name)
        super().hybridize(True, *args, **kwargs)

    def _clear_cached_op(self) -> None:
        self._amp.ops.clear()
        super()._clear_cached_op()

    def _build_cache(self, *args: Any) -> None:
        parameters = self.collect_params().values()
        if any(p._deferred_init for p in parameters):
            self._get_graph(*args)
            self._deferred_infer_shape(*args)
            with initialized_in_float32(parameters):
                for parameter in parameters:
                    parameter._finish_deferred_init()
        super()._build_cache(*args)
        # Statistics that the user's own block gives to a batch norm: MXNet takes float32 only.
        # Being no longer differentiable marks them for the next `convert`.
        by_name = {p.name: p for p in parameters}
        for node in Graph.read(self._cached_graph[1]).nodes():
            for entry in node.inputs[3:] if node.op in BATCH_NORMS else ():
                statistic = by_name.get(entry.node.name)
                if statistic is not None and dtype_name(statistic.dtype) == "float16":
                    statistic.cast("float32")
                    statistic._differentiable = False

    def _call_cached_op(self, *args: Any) -> Any:
        if self._cached_op is None:
            self._build_cache(*args)
        arrays = [a for a in mx.gluon.block._flatten(args, "input")[0] if a is not None]
        key = arrays[0].context.device_type == "gpu", tuple(dtype_name(a.dtype) for a in arrays)
        if key not in self._amp.ops:
            self._amp.ops[key] = self._make_op(*key)
        self._cached_op, self._cached_op_args = self._amp.ops[key]
        return super()._call_cached_op(*args)

    def _make_op(self, on_gpu: bool, dtypes: Tuple[str, ...]) -> Tuple[Any, List[Any]]:
        """The CachedOp for this case, and where its inputs come from."""
        data, clean = self._cached_graph
        graph, types = self.mixed_graph(dtypes)
        names = [d.name for d in data]
        symbol = build(graph, types, on_gpu, self._amp.policy).symbol()
        if isinstance(clean, mx.sym.numpy._Symbol):
            symbol = symbol.as_np_ndarray()
        parameters = self.collect_params()
        inputs = [(True, names.index(name)) if name in names else (False, parameters[name])
                  for name in symbol.list_inputs()]
        flags = [("data_indices", [i for i, (is_data, _) in enumerate(inputs) if is_data]),
                 ("param_indices", [i for i, (is_data, _) in enumerate(inputs) if not is_data])]
        return mx.nd.CachedOp(symbol, flags + list(self._flags)), inputs

    def mixed_graph(self, dtypes: Iterable[str]) -> Tuple[Graph, Dict[str, str]]:
        """The graph that a GPU runs for inputs of these types, and its variables' types."""
        data, clean = self._cached_graph
        parameters = self.collect_params()
        types = {p.name: dtype_name(p.dtype) for p in parameters.values()}
        types.update(zip((d.name for d in data), dtypes))
        keep = frozenset().union(*(state.keep_nodes for state in _states(self)))
        graph = insert_casts(Graph.read(clean), types, self._amp.policy, parameters, keep)
        return graph, types

    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = True) -> None:
        """Writes PATH-symbol.json and PATH-EPOCH.params, for any machine with MXNet.

        Args:
            remove_amp_cast: True writes the float32 network. False writes the casts and
                the parameters in the types they have: float16, for a GPU.
        """
        if not self._cached_graph or not self._cached_op_args:
            raise RuntimeError(f"export needs the graph: run {self.name} on data once before")
        data, clean = self._cached_graph
        graph = Graph.read(clean)
        if not remove_amp_cast:
            graph, _ = self.mixed_graph(["float32"] * len(data))
        for node in _nodes_within(graph):
            node.attrs.pop(KEEP, None)
            if node.is_variable and remove_amp_cast:
                node.attrs.pop("__dtype__", None)
        symbol = graph.symbol()
        kinds = {**dict.fromkeys(symbol.list_arguments(), "arg"),
                 **dict.fromkeys(symbol.list_auxiliary_states(), "aux")}
        arrays = {}
        for name, parameter in self.collect_params().items():
            if name in kinds:
                array = parameter._reduce()
                arrays[f"{kinds[name]}:{name}"] = to_float32(array) if remove_amp_cast else array
        replace_file(f"{path}-{epoch:04d}.params", lambda p: mx.nd.save(p, arrays))
        replace_file(f"{path}-symbol.json",
                     lambda p: symbol.save(p, remove_amp_cast=remove_amp_cast))


def _nodes_within(graph: Graph) -> Iterator[Node]:
    """The graph's nodes and those in the bodies of its loops."""
    for node in graph.nodes():
        yield node
        for body in node.subgraphs:
            yield from _nodes_within(body)


def _states(block: Any) -> Iterator[State]:
    if isinstance(block, ConvertedBlock):
        yield block._amp
    for child in block._children.values():
        yield from _states(child)


@functools.lru_cache(maxsize=None)
def converted_class(cls: Any) -> Any:
    """The subclass that a block of this class gets; it goes by the same name."""
    front = ConvertedHybridBlock if issubclass(cls, mx.gluon.HybridBlock) else ConvertedBlock
    return type(cls.__name__, (front, cls),
                {"__module__": cls.__module__, "__qualname__": cls.__qualname__,
                 "__doc__": cls.__doc__})
