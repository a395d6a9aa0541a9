"""Which line of the user's Python made a node: the network is traced once more, with a look at the
stack where MXNet makes each node."""
import inspect
import linecache
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Callable, Dict, Hashable, Iterator, List, Optional, Sequence

from .._mxnet import mx
from ..annotations import Array, Batch, Block, Network
from ..cpu.library import random_numbers_kept
from ..gluon.converted import ConvertedHybridBlock
from ..gluon.state import Op, blocks_in
from ..graph.graph import Graph
from .names import owner
from .overflow import Overflow
from .statistics import Key
from .tensors import Layout
from .trial import Trial, call, split, standing_in

_LINE = "__gluon_amp_line__"
_NOT_THE_USERS = ("mxnet", "gluon_amp")


class _Lines(Dict[str, str]):
    """The attributes that MXNet's scopes give to each node that is made: they copy theirs, and a
    scope within another one, such as a loop's, begins with a copy. One of these is the line."""

    def copy(self) -> "_Lines":
        return _Lines(self, **{_LINE: _line_of_the_user()})


class _Scope(mx.AttrScope):
    _attr: Dict[str, str]

    def __enter__(self) -> "_Scope":
        super().__enter__()
        self._attr = _Lines(self._attr).copy()  # never empty, which MXNet would pass by
        return self


def _line_of_the_user() -> str:
    """The innermost line within the call of the network that is neither MXNet's nor ours."""
    frame: Optional[FrameType] = inspect.currentframe()
    while frame is not None and frame.f_code is not call.__code__:
        if frame.f_globals.get("__name__", "").split(".")[0] not in _NOT_THE_USERS:
            path, number = frame.f_code.co_filename, frame.f_lineno
            text = linecache.getline(path, number).strip()
            return f"{path}, line {number}" + (f": {text}" if text else "")
        frame = frame.f_back
    return ""


def lines(net: Network, data: Sequence[Any], make: Callable[..., Any]) -> Dict[str, str]:
    """The line that made each node, where there is one of the user's.

    Args:
        make: gives what runs in place of a block's graph, as for `standing_in`.
    """
    found: Dict[str, str] = {}

    def look(block: Block, key: Hashable, arrays: Sequence[Array]) -> Op:
        for node in Graph.read(block._cached_graph[1]).nodes_within():
            found.setdefault(node.name, node.attrs.get(_LINE, ""))
        return make(block, key, arrays)

    with _traced_anew(net), _Scope(), mx.autograd.record(), standing_in(net, look):
        call(net, data)
    mx.nd.waitall()
    return found


@contextmanager
def _traced_anew(net: Network) -> Iterator[None]:
    """Meanwhile the network's blocks know no graphs, and trace those that they run."""
    blocks: List[Any] = [b for b in blocks_in(net) if isinstance(b, ConvertedHybridBlock)
                         and not isinstance(b, mx.gluon.SymbolBlock)]
    names = ("_cached_graph", "_in_format", "_out_format", "_cached_op", "_cached_op_args")
    before = [(b._amp.traces, [getattr(b, name, None) for name in names]) for b in blocks]
    for block in blocks:
        block._amp.traces, block._cached_graph = {}, ()
    try:
        yield
    finally:
        for block, (traces, values) in zip(blocks, before):
            block._amp.traces = traces
            for name, value in zip(names, values):
                setattr(block, name, value)


def where(trial: Trial, batch: Batch, layout: Layout, found: Overflow) -> str:
    """The code of the node that has overflowed; of a cast of data, of what reads it; of a gradient
    that a cast rounds, of what makes it."""
    if not found.op:
        return ""
    return _code_of(trial, batch, layout.blamed(Key(found.node, found.backward, 0)))


def _code_of(trial: Trial, batch: Batch, node: str) -> str:
    """The line of the user's code that made a node; if MXNet's own made it, the block that the node
    belongs to, and where its code is."""
    net = trial.net
    if isinstance(net, mx.gluon.SymbolBlock):
        return ""
    with random_numbers_kept():
        line = lines(net, split(batch)[0], trial.make).get(node.split("_amp_cast_")[0])
    block = owner(net, node)
    if line:
        return f"block {block.name}, {line}"
    for cls in type(block).__mro__:
        code = vars(cls).get("hybrid_forward")
        if code is not None:
            code = inspect.unwrap(code)  # of a class with use_np
            with suppress(OSError, TypeError):
                return f"block {block.name}, {inspect.getsourcefile(code)}, line " \
                       f"{inspect.getsourcelines(code)[1]}"
    return f"block {block.name}"
