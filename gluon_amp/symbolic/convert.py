"""`convert_symbol` and `convert_model`: the Symbolic API's networks in mixed precision."""
from __future__ import annotations

import difflib
import re
from typing import Any, Collection, Dict, Iterable, Set, Tuple, Union

from mxnet.operator import get_operator_arguments

from .._mxnet import mx, replace
from ..annotations import Symbol
from ..checks import listed
from ..cpu.arrays import beyond_float16, dtype_name, small_in_float16
from ..graph.casts import float32_variables, insert_casts
from ..graph.graph import TYPE_FLAG, TYPE_NAME, Graph
from ..graph.keep import kept_operators, operator_names
from ..policy import Policy, get_policy
from ..record import Record, put_record, read_record, record_in, record_like, refuse_others

# Names of operators' inputs that are parameters.
_PARAMETERS = frozenset("weight bias gamma beta parameters".split())


def convert_symbol(sym: Symbol, policy: Union[str, Policy, None] = None,
                   keep: Iterable[str] = (), like: Union[str, bool, None] = None
                   ) -> Symbol:
    """Returns a symbol in mixed precision.

    It has a cast after the data, the body in the policy's type, norms in float32, and a cast
    before each softmax and loss. Arguments and outputs keep their names, so float32 checkpoints
    load. The symbol holds the types of its parameters. It runs on GPUs with any `Module`, and on
    CPUs with `gluon_amp.Module`. Existing casts stay.

    Args:
        sym: a symbol.
        policy: as for `gluon_amp.convert`.
        keep: what stays float32: regular expressions for whole names of nodes, and
            `gluon_amp.ops(...)`.
        like: as for `gluon_amp.convert`, a file of the parameters of this symbol.

    Raises:
        ValueError: `keep` matches nothing, or the symbol, which a
            converted network exported, records another policy or keeps more.
    """
    if not isinstance(sym, mx.sym.Symbol):
        hint = " Use gluon_amp.convert for Gluon's." if isinstance(sym, mx.gluon.Block) else ""
        raise TypeError(f"convert_symbol takes a Symbol.{hint} Received: {type(sym).__name__}")
    policy, keep = _as_recorded(policy, keep, like)
    graph = Graph.read(sym)
    kept = kept_operators(graph, [keep] if isinstance(keep, str) else keep)
    if policy.is_float32:
        return graph.symbol()
    recorded = record_in(sym)
    if recorded is not None and like is not False:
        _check(recorded, "the symbol", policy, kept, graph)
    parameters = parameter_names(graph)
    types = _types(graph, parameters, policy, kept)
    mixed = insert_casts(graph, types, policy, parameters, kept)
    for node in mixed.nodes():
        if node.op == "amp_cast":  # MXNet does not save amp_cast, but saves the types below
            node.op, node.name = "Cast", node.name.replace("_amp_cast_", "_cast_")
        for entry in node.inputs:  # MXNet does not infer the type of a cast's input
            name = entry.node.name
            if entry.node.is_variable and (node.op == "Cast" or types[name] != "float32"):
                entry.node.attrs["__dtype__"] = str(TYPE_FLAG[types[name]])
    _keep_outputs(graph, mixed)
    put_record(mixed, Record({"": policy}, nodes=tuple(sorted(kept))))
    return mixed.symbol()


def refuse_in_feed_forward() -> None:
    """Refuses to train converted symbols with MXNet's `FeedForward`, which has neither master
    weights nor a loss scale."""
    @replace(mx.model.FeedForward, "fit")
    def fit(self: Any, *args: Any, original: Any, **kwargs: Any) -> Any:
        recorded = isinstance(self.symbol, mx.sym.Symbol) and record_in(self.symbol)
        if recorded:
            raise ValueError("FeedForward trains without master weights and without a loss scale, "
                             "and this symbol is in mixed precision. Valid: gluon_amp.Module("
                             "symbol).fit(data, ...), or the float32 symbol. Received: a symbol in "
                             f"{recorded.text()}")
        return original(self, *args, **kwargs)


def _as_recorded(policy: Union[str, Policy, None], keep: Iterable[str], like: object
                 ) -> Tuple[Policy, Iterable[str]]:
    """Returns the policy and `keep` that a file records, or else the given ones."""
    if like in (None, False):
        return get_policy("float16" if policy is None else policy), keep
    path, record = record_like(like, policy, keep)
    if record.nodes is None:
        raise ValueError(f"{path} records a network of blocks, which gluon_amp.convert takes. "
                         "Valid: the parameters of an exported symbol or of a Module")
    return record.policies[""], [re.escape(name) for name in record.nodes]


def _check(recorded: Record, source: str, policy: Policy, kept: Collection[str], graph: Graph
           ) -> None:
    """Refuses another policy than a record's, and nodes that it keeps in float32."""
    nodes = set(recorded.nodes or ()) & operator_names(graph)
    others = [] if policy == recorded.policies.get("", policy) else [policy.name]
    refuse_others(recorded, source, others, sorted(nodes - set(kept)), "convert_symbol(symbol")


def check_record(sym: Symbol, params: str) -> None:
    """Compares a converted symbol with the record of a file of parameters."""
    mine, recorded = record_in(sym), read_record(params)
    if mine is not None and recorded is not None:
        _check(recorded, params, mine.policies[""], mine.nodes or (), Graph.read(sym))


def convert_model(sym: Symbol, arg_params: Dict[str, Any], aux_params: Dict[str, Any],
                  policy: Union[str, Policy, None] = None, keep: Iterable[str] = (),
                  like: Union[str, bool, None] = None
                  ) -> Tuple[Symbol, Dict[str, Any], Dict[str, Any]]:
    """Converts a checkpoint to mixed precision.

    Args:
        sym: the checkpoint's symbol.
        arg_params: its parameters, by name.
        aux_params: its auxiliary states, by name.
        policy: as for `convert_symbol`.
        keep: as for `convert_symbol`.
        like: as for `convert_symbol`.

    Returns:
        The converted symbol, and both dicts in its types.

    Raises:
        ValueError: as `convert_symbol`; or parameters are missing, unknown, or beyond the range of
            their type.
    """
    converted = convert_symbol(sym, policy, keep, like)
    check_parameters(converted, arg_params, aux_params)
    types = declared_types(Graph.read(converted))
    small_in_float16({name: array for name, array in arg_params.items() if types.get(
        name) == "float16" and dtype_name(array.dtype) == "float32"})

    def cast(arrays: Dict[str, Any]) -> Dict[str, Any]:
        return {name: a.astype(types.get(name, "float32"), copy=False) if "float" in
                dtype_name(a.dtype) else a for name, a in arrays.items()}
    return converted, cast(arg_params), cast(aux_params)


def check_parameters(sym: Symbol, arg_params: Dict[str, Any],
                     aux_params: Dict[str, Any]) -> None:
    """Raises ValueError for parameters that are missing, misnamed, or beyond float16's range."""
    there = {*arg_params, *aux_params}
    names = {*sym.list_arguments(), *sym.list_auxiliary_states()}
    missing = sorted((parameter_names(Graph.read(sym)) | set(sym.list_auxiliary_states())) - there)
    extra = sorted(there - names)
    if not missing and not extra:
        check_range(declared_types(Graph.read(sym)), arg_params)
        return
    problems = []
    for name in missing:
        close = difflib.get_close_matches(name, extra, n=1)
        problems.append(f"missing {name}" + (f" (misnamed {close[0]}?)" if close else ""))
    problems += [f"unknown {name}" for name in extra]
    raise ValueError(f"the checkpoint does not fit the symbol: {listed(problems, most=10)}")


def check_range(types: Dict[str, str], arrays: Dict[str, Any]) -> None:
    """Refuses to cast float32 arrays with values beyond float16's range to float16."""
    names = [name for name, array in arrays.items()
             if types.get(name) == "float16" and dtype_name(array.dtype) == "float32"]
    beyond = {name: size for name, size in
             zip(names, beyond_float16([arrays[name] for name in names])) if size}
    if beyond:
        received = listed([f"{name} (up to {size:.6g})" for name, size in beyond.items()])
        raise ValueError("float16 ends at 65504, and these parameters exceed it: keep the nodes "
                         f"that read them in float32 (keep=). Received: {received}")


def declared_types(graph: Graph) -> Dict[str, str]:
    """Returns the declared types of a graph's variables."""
    declared = {node.name: node.attrs.get("__dtype__", "-1") for node in graph.nodes()
                if node.is_variable}
    return {name: TYPE_NAME[int(flag)] for name, flag in declared.items() if flag != "-1"}


def parameter_names(graph: Graph) -> Set[str]:
    """Returns the variables that operators read only as parameters, never as data."""
    parameters: Set[str] = set()
    data: Set[str] = {e.node.name for e in graph.outputs}
    for node in graph.nodes():
        names = [] if node.is_variable else get_operator_arguments(node.op).names
        for i, entry in enumerate(node.inputs):
            if entry.node.is_variable:
                takes = names[i] if i < len(names) else ""
                (parameters if takes in _PARAMETERS else data).add(entry.node.name)
    return parameters - data


def _types(graph: Graph, parameters: Set[str], policy: Policy, kept: Set[str]) -> Dict[str, str]:
    """Returns the type of each variable."""
    wide = float32_variables(graph, policy, kept)
    types = {name: policy.parameter.name if name in parameters - wide else "float32"
             for name in graph.variables()}
    # Gluon declares float32 for every parameter that it traces, so float32 is no user's choice.
    return {**types, **{n: t for n, t in declared_types(graph).items() if t != "float32"}}


def _keep_outputs(before: Graph, after: Graph) -> None:
    """Gives a cast at an output the name and attributes of the operator whose output it casts."""
    for old, new in zip(before.outputs, after.outputs):
        if old.node.is_variable or new.node.name == old.node.name:
            continue
        new.node.attrs.update((key, value) for key, value in old.node.attrs.items()
                              if key.startswith("__"))  # such as the layout; not the operator's
        source = new.node.inputs[0].node
        if source.name == old.node.name:
            new.node.name, source.name = source.name, f"{source.name}_float16"
