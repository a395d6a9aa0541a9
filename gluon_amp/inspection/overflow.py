"""Where infinities begin: the node, and the line of the user's Python that made it."""
import inspect
import linecache
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Callable, Collection, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from .._mxnet import mx
from ..annotations import Array, Batch, Block, Network
from ..cpu.library import random_numbers_kept
from ..gluon.converted import ConvertedHybridBlock
from ..gluon.state import Op, blocks_in
from ..graph.graph import CASTS, Graph
from .names import owners
from .session import Graphs, call, split, standing_in
from .statistics import Counted, Counts, Key
from .tensors import Tensor, counted_reads


@dataclass
class Overflow:
    """The first tensor that is not finite though all that it is computed from is.

    Attributes:
        node: the name of the node that has computed it; or of the data or the parameter that was
            not finite before anything was computed.
        tensor: its own name.
        op: the node's operator; "" of data and parameters.
        backward: whether it is of the backward pass.
        batch: the number of the batch, from 0 on.
        scale: the loss scale of that pass.
        inputs: the names of what it read, with parameters and data, and the exponents of the
            smallest and the largest number.
        where: the user's block, with the file and line of its code, if that can be had.
    """
    node: str
    tensor: str
    op: str
    backward: bool
    batch: int
    scale: float
    inputs: Dict[str, Optional[Tuple[int, int]]]
    where: str = ""

    def __str__(self) -> str:
        if not self.op:
            return f"batch {self.batch}: {self.node} is not finite before anything is computed"
        ranges = ", ".join(f"{name} 2^{r[0]} to 2^{r[1]}" if r else f"{name} all 0"
                           for name, r in self.inputs.items())
        ranges = ranges or ("the loss" if self.backward else "parameters and data")
        which = f" at the loss scale {self.scale:g}" if self.backward else ""
        where = f" ({self.where})" if self.where else ""
        return f"batch {self.batch}: {self.tensor} ({self.op}) is the first that is not " \
               f"finite{which}{where}. It is computed from: {ranges}"


def is_finite(counts: Counts) -> bool:
    """Whether a tensor has no infinity and no NaN, once it is rounded."""
    return counts.finite and counts.overflowed == 0


def unsound(tensors: Collection[Tensor], counts: Mapping[Key, Counts]) -> List[Tensor]:
    """The tensors that are not finite, in order of computation, but for infinities that come to
    nothing: no rounding has made them, and whoever reads them makes numbers of them, as a softmax
    does of those that a mask holds."""
    broken = counts.broken() if isinstance(counts, Counted) else {
        key for key, held in counts.items() if not is_finite(held)}
    found = [t for t in tensors if t.key in broken] if broken else []
    if not found:
        return []
    found, tensors = (sorted(some, key=lambda t: t.place) for some in (found, tensors))
    reads, readers = counted_reads(tensors, counts), {}  # type: Any, Dict[Key, List[Key]]
    for tensor in tensors:
        for key in reads[tensor.key] if tensor.key in counts and not tensor.key.backward else ():
            readers.setdefault(key, []).append(tensor.key)
    made: Dict[Key, Tensor] = {}
    for tensor in reversed(found):
        held, behind = counts[tensor.key], readers.get(tensor.key, [])
        if held.overflowed or held.nan or not behind or any(key in made for key in behind):
            made[tensor.key] = tensor
    return list(made.values())[::-1]


def goes_forward(tensors: Collection[Tensor], counts: Mapping[Key, Counts]) -> bool:
    """Whether nothing breaks before the loss."""
    return all(t.key.backward for t in unsound(tensors, counts))


def first_overflow(graphs: Graphs, counts: Mapping[Key, Counts], batch: int, scale: float,
                   arrays: Mapping[str, Any]) -> Optional[Overflow]:
    """In one step's counts.

    Args:
        arrays: the data and parameters that are known, by name.
    """
    broken = unsound(graphs.tensors, counts)
    if not broken:
        return None
    layout, by_key = graphs.layout, {tensor.key: tensor for tensor in graphs.tensors}
    reads_of = counted_reads(by_key.values(), counts)
    tensor = beginnings(broken, reads_of, counts)[0]
    cast = [by_key[key] for key in reads_of[tensor.key] if key in by_key]
    if tensor.op in CASTS and cast and layout.is_cast_back(layout.nodes[cast[0].key.node]):
        tensor = cast[0]  # which is float32 within, and rounds by that cast
    given = {name: Counts.of_array(arrays[name]) for name in tensor.variables
             if name in arrays}
    for name, held in given.items():
        if not held.finite:
            return Overflow(name, name, "", False, batch, scale, {})
    output = by_key.get(Key(tensor.key.node, False, 0))
    all_reads = dict.fromkeys(reads_of[tensor.key] + (reads_of[output.key] if output else []))
    inputs = {by_key[key].name: counts[key].range for key in all_reads if key in by_key}
    inputs.update((name, held.range) for name, held in given.items())
    return Overflow(tensor.key.node, tensor.name, tensor.op, tensor.key.backward, batch, scale,
                    inputs)


def beginnings(broken: Collection[Tensor], reads: Mapping[Key, List[Key]],
               counts: Mapping[Key, Counts]) -> List[Tensor]:
    """Of tensors that are not finite, those that are computed from no other of these, in order.
    Loops, and blocks that are called several times, go round in circles, since counts are of all
    rounds: of a circle it is one that rounding has made infinite, if there is such, and of these
    the one that has read the fewest infinities."""
    def order(tensor: Tensor) -> Tuple[bool, float, int]:
        held = counts[tensor.key]
        return not held.overflowed, (held.infinite + held.nan) / held.numbers, tensor.place
    left = {t.key: t for t in sorted(broken, key=order)}
    before = {key: [k for k in reads[key] + t.carried if k in left] for key, t in left.items()}
    behind: Dict[Key, List[Key]] = {key: [] for key in left}
    for key, found in before.items():
        for read in found:
            behind[read].append(key)
    made = [t for key, t in left.items() if not before[key]]
    follow = reached([t.key for t in made], behind)
    for key, tensor in left.items():
        if key in follow or not before[key]:
            continue
        round_ = reached([key], behind)
        if round_ >= reached([key], before):
            made.append(tensor)
            follow |= round_
    return sorted(made, key=lambda t: t.place)


def reached(keys: List[Key], ways: Mapping[Key, List[Key]],
            ends: Callable[[Key], Any] = lambda key: False) -> Set[Key]:
    """All that is reached from some keys, by one step or more, and not through where it ends."""
    found: Set[Key] = set()
    left = list(keys)
    while left:
        new = [key for key in ways.get(left.pop(), ()) if key not in found]
        found.update(new)
        left += [key for key in new if not ends(key)]
    return found


# ---- the code ------------------------------------------------------------------------------------

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


def where(graphs: Graphs, batch: Batch, found: Overflow) -> str:
    """The line of the user's code that made the node that has overflowed; of a cast of data, of
    what reads it; of a gradient that a cast rounds, of what makes it. If MXNet's own code made the
    node, the block that it belongs to, and where its code is. The network is traced once more, with
    a look at the stack where MXNet makes each node."""
    net = graphs.session.net
    if not found.op or isinstance(net, mx.gluon.SymbolBlock):
        return ""
    node = graphs.layout.blamed(Key(found.node, found.backward, 0))
    lines: Dict[str, str] = {}

    def look(block: Block, key: Any, arrays: List[Array]) -> Op:
        for made in Graph.read(block._cached_graph[1]).nodes_within():
            lines.setdefault(made.name, made.attrs.get(_LINE, ""))
        return graphs.make(block, key, arrays)

    with random_numbers_kept(), _traced_anew(net), _Scope(), mx.autograd.record(), \
            standing_in(net, look):
        call(net, split(batch)[0])
    line, block = lines.get(node.split("_amp_cast_")[0]), owners(net, node)[0]
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
