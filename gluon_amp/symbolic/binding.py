"""Binds a symbol to executors, with settings for 16-bit nodes and a variable for the loss scale.

`Bindable` is the clean symbol, as saved and shown. Only `simple_bind` differs: it binds another
graph with the same arguments, gradients and outputs.

The loss scale s multiplies only the gradient of a loss head. One operator of x and s precedes each
head. It returns x, and the engine multiplies its gradient by s (cpu/dispatch/gradients.cc). If the
engine does not load, s multiplies a zero that has the gradient of x:

    x  ->  BlockGrad(x) + (c - BlockGrad(c)) * s  ->  loss head      with c = clip(x), finite
"""
import ctypes
from contextlib import contextmanager, nullcontext
from typing import (
    AbstractSet,
    Any,
    Callable,
    Collection,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Union,
)

from .._mxnet import environment, keeping_graphs, mx
from ..annotations import Context, DType, Symbol
from ..cpu import library
from ..cpu.arrays import TYPES_16BIT, array_type, dtype_name
from ..graph.build import (
    build,
    check_device,
    check_trains_on_cpus,
    devices_that_wait,
    keep_averages_finite,
)
from ..graph.channels_last import channels_last
from ..graph.graph import GROUP, VARIABLE, Entry, Graph, Node
from ..graph.norms import fuse_norms
from ..graph.operators import BATCH_NORMS, LOSSES, moving_averages
from ..policy import POLICIES
from ..training.heads import loss_heads

SCALE = "gluon_amp_loss_scale"


def _is_scale(variable: str) -> bool:
    return variable.startswith(SCALE)


def with_loss_scale(graph: Graph, types: Optional[Mapping[Entry, Optional[str]]] = None,
                    groups: Collection[str] = ()) -> Graph:
    """Returns the graph with the scale's variable before each loss head.

    `types` are those of the graph's entries. Without them, loss heads read float32. Heads on the
    devices of `groups` have a variable for each group: MXNet copies a variable to other devices in
    the forward pass, before the scale is set.
    """
    def scale_of(group: Mapping[str, str]) -> Entry:
        return Entry(Node(VARIABLE, "_".join([SCALE, *group.values()]), group))

    scales: Dict[str, Entry] = {}
    one_operator = library.started()
    for node in graph.nodes():
        if node.op in LOSSES:
            x = node.inputs[0]
            name = node.attrs.get(GROUP, "")
            group = {GROUP: name} if name in groups else {}
            scale = scales.setdefault(name if group else "", scale_of(group))

            def new(op: str, *inputs: Entry, name: str = node.name,
                    group: Mapping[str, str] = group, **attrs: str) -> Entry:
                return Entry(Node(op, f"{name}_{op.lower()}_scaled", {**attrs, **group}, inputs))

            half = types is not None and types.get(x) == "float16"
            if half:
                x = new("Cast", x, dtype="float32")
            if one_operator:
                x = new("_identity_with_attr_like_rhs", x, scale)
                x.node.settings["loss_scale"] = "1"
            else:
                finite = new("clip", x, a_min="-3e38", a_max="3e38")  # -inf - -inf would be NaN
                zero = new("elemwise_sub", finite, new("BlockGrad", finite))
                x = new("elemwise_add", new("BlockGrad", x), new("broadcast_mul", zero, scale))
            if half:
                x = new("Cast", x, dtype="float16", name=f"{node.name}_low")
            node.inputs[0] = x
    return graph


@contextmanager
def _bound_as_built(group2ctx: Any) -> Iterator[None]:
    """Prevents MXNet from rewriting a float16 graph while it binds it on a CPU.

    MXNet's oneDNN subgraphs cache the weights of the first prediction unless these are variables,
    and a float16 weight of a float32 layer is the result of a cast. To save memory, MXNet may also
    recompute operators in the backward pass, where batch norms would update statistics twice.
    """
    with keeping_graphs(group2ctx), environment("MXNET_BACKWARD_DO_MIRROR", "0"):
        yield


GradReq = Union[str, Sequence[str], Mapping[str, str]]


class Bindable(mx.sym.Symbol):
    """A symbol that binds a graph with settings and a loss scale."""

    # whether backward passes of a graph with arrays of these 16-bit types have a loss scale
    decide_scale: Callable[[Collection[str]], bool] = staticmethod(lambda types: False)
    has_loss: bool = False  # whether any node is a loss head
    devices: int = 1  # devices that synchronize in training
    averages: FrozenSet[str] = frozenset()  # names of moving averages of MXNet's operators

    @classmethod
    def from_symbol(cls, symbol: "mx.sym.Symbol",
                    decide_scale: Callable[[Collection[str]], bool]) -> "Bindable":
        handle = mx.base.SymbolHandle()
        mx.base.check_call(mx.base._LIB.MXSymbolCopy(symbol.handle, ctypes.byref(handle)))
        bindable = cls(handle)
        bindable.decide_scale = decide_scale
        graph = Graph.read(symbol)
        bindable.has_loss = any(node.op in LOSSES for node in graph.nodes())
        bindable.devices = devices_that_wait(graph)
        bindable.averages = frozenset(moving_averages(graph))
        return bindable

    def simple_bind(self, ctx: Context, grad_req: GradReq = "write",
                    type_dict: Optional[Mapping[str, DType]] = None,
                    **kwargs: Any) -> Any:
        types = self._types(type_dict or {})
        graph = Graph.read(self)
        entries = graph.types(types)
        low = {dtype for dtype in entries.values() if dtype in TYPES_16BIT}
        requests = _requests(grad_req, self.list_arguments())
        trains = any(request != "null" for request in requests.values())
        is_scaled = trains and self.decide_scale(low)
        frozen = _freeze(graph, requests)
        averages = keep_averages_finite(graph)
        if not (low or frozen or averages or is_scaled):
            return super().simple_bind(ctx, grad_req, type_dict, **kwargs)
        shapes = {name: shape for name, shape in kwargs.items() if isinstance(shape, tuple)}
        options = {name: value for name, value in kwargs.items() if name not in shapes}
        heads: Set[str] = set()
        if is_scaled:
            trained = [name for name, request in requests.items() if request != "null"]
            unscaled = loss_heads(graph, trained, library.facts_on_gradients(self))
            scaled = {node for node in graph.nodes() if node.op in LOSSES}
            heads = {node.op for node, trains in unscaled if trains and node not in scaled}
            graph = with_loss_scale(graph, entries, options.get("group2ctx") or ())
            for name in filter(_is_scale, graph.variables()):
                shapes[name], types[name], requests[name] = (1,), "float32", "null"
        on_gpu = ctx.device_type == "gpu"
        if low:
            check_device(graph, POLICIES["bfloat16" if "bfloat16" in low else "float16"], on_gpu)
            trains_on_gpu = on_gpu and trains
            graph = build(channels_last(graph, types) if trains_on_gpu else graph, types)
            graph = fuse_norms(graph, types) if trains_on_gpu else graph
        as_built = bool(low) and not on_gpu
        with _bound_as_built(options.get("group2ctx")) if as_built else nullcontext():
            executor = graph.symbol().simple_bind(
                ctx, requests, {k: array_type(t) for k, t in types.items()}, **options,
                **shapes)
        bound = Executor.from_bound(executor, self, options)
        bound.unscaled_heads = heads
        return bound

    def _types(self, given: Mapping[str, Any]) -> Dict[str, str]:
        """Returns the type of each variable, by default float32."""
        arguments, _, auxiliary = self.infer_type_partial(**given)
        names = [*self.list_arguments(), *self.list_auxiliary_states()]
        return {name: "float32" if t is None else dtype_name(t)
                for name, t in zip(names, [*arguments, *auxiliary])}


class Executor(mx.executor.Executor):
    """The executor of a bound graph, with the arguments of the clean symbol in their order."""

    unscaled_heads: AbstractSet[str] = frozenset()  # operators that ignore the loss scale

    @classmethod
    def from_bound(cls, executor: mx.executor.Executor, clean: Bindable,
                   options: Dict[str, Any]) -> "Executor":
        bound = {name: (array, grad) for name, array, grad in
                 zip(executor._symbol.list_arguments(), executor.arg_arrays, executor.grad_arrays)}
        auxiliary = executor.aux_dict
        scales = [bound.pop(name)[0] for name in list(bound) if _is_scale(name)]
        executor.__class__ = cls
        executor._bound_types = {name: array.dtype for name, (array, _) in bound.items()}
        executor._clean, executor._options = clean, options
        executor._scales, executor._reshaped, executor._monitor = scales, {}, None
        executor._symbol = clean
        executor.arg_arrays = [bound[name][0] for name in clean.list_arguments()]
        executor.grad_arrays = [bound[name][1] for name in clean.list_arguments()]
        executor.aux_arrays = [auxiliary[name] for name in clean.list_auxiliary_states()]
        executor._arg_dict = executor._grad_dict = executor._aux_dict = None
        executor.set_scale(1)
        return executor

    def forward(self, is_train: bool = False, **kwargs: Any) -> Any:
        if is_train and self._ctx.device_type != "gpu":
            check_trains_on_cpus(self._clean.devices)
        return super().forward(is_train, **kwargs)

    def set_scale(self, scale: float) -> None:
        """Sets the scale of gradients of loss heads in the next backward pass."""
        for variable in self._scales:
            variable[:] = scale

    def get_optimized_symbol(self) -> Symbol:
        """Returns the bound symbol. It has no settings: they are valid in this process only."""
        graph = Graph.read(super().get_optimized_symbol())
        for node in graph.nodes_within():
            node.attrs.pop(library.SETTINGS, None)
        return graph.symbol()

    def set_monitor_callback(self, callback: Callable[..., None],
                             monitor_all: bool = False) -> None:
        self._monitor = callback, monitor_all
        super().set_monitor_callback(callback, monitor_all)

    def reshape(self, partial_shaping: bool = False, allow_up_sizing: bool = False,
                **kwargs: Any) -> Any:
        """Returns an executor for other shapes with the same parameters, cached by shapes."""
        key = tuple(sorted(kwargs.items()))
        if key not in self._reshaped:
            options = {**self._options, "shared_exec": self, "shared_arg_names": [
                name for name in self.arg_dict if name not in kwargs]}
            self._reshaped[key] = self._clean.simple_bind(self._ctx, self._grad_req,
                                                          self._bound_types, **options, **kwargs)
        if self._monitor is not None:
            self._reshaped[key].set_monitor_callback(*self._monitor)
        return self._reshaped[key]


def _freeze(graph: Graph, requests: Mapping[str, str]) -> bool:
    """Makes batch norms normalize with their moving averages, without updates, if the graph trains
    but none of their parameters. Returns whether there are any."""
    trains = any(request != "null" for request in requests.values())
    frozen = [node for node in graph.nodes() if trains and node.op in BATCH_NORMS
              and all(requests.get(entry.node.name) == "null" for entry in _parameters_of(node))]
    for node in frozen:
        node.attrs["use_global_stats"] = "True"
    return bool(frozen)


def _parameters_of(norm: Node) -> List[Entry]:
    """Returns gamma and beta of a batch norm; beta alone if it fixes gamma at 1."""
    return norm.inputs[2 if norm.is_set("fix_gamma", True) else 1:3]


def _requests(grad_req: Any, arguments: List[str]) -> Dict[str, str]:
    if isinstance(grad_req, str):
        return dict.fromkeys(arguments, grad_req)
    if isinstance(grad_req, (list, tuple)):
        return dict(zip(arguments, grad_req))
    return {name: grad_req.get(name, "null") for name in arguments}
