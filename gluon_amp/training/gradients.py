"""The gradients of a Trainer or a Module: what computes and writes them, and their norm."""
import functools
import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

from .._mxnet import mx, np
from ..annotations import Array
from ..checks import same_objects
from ..cpu.arrays import Squares, not_finite, squares
from ..cpu.library import marks, read, versions
from . import refusals
from .moving_averages import MovingAverages

Method = TypeVar("Method", bound=Callable[..., Any])

_LONGEST = 600  # seconds that a call waits for those of other threads


@dataclass(eq=False)
class Gradient:
    """The gradient of one parameter on one device.

    Attributes:
        key: the parameter's, as the kvstore has it.
        number: that of the parameter's state in MXNet's updater.
        name: the parameter's.
        device: the device's number.
        weight: the parameter's array.
        own: the gradient.
        array: for the update: the gradient or its replacement.
        adds: whether backward passes add to it.
        is_new: whether a backward pass has written it since the last step.
    """
    key: Hashable
    number: int
    name: str
    device: int
    weight: Any
    own: Any
    array: Any
    adds: bool
    is_new: bool = False


class Gradients:
    """The gradients of a Trainer or a Module.

    MXNet marks the weights of gradients that autograd writes. Executors write all gradients, and
    mark nothing.

    Args:
        read: returns the gradients of trained parameters; the same list again if nothing has
            changed.
        marked: whether autograd writes them.
        adding: returns the arrays to which backward passes add; by default those of parameters.

    Attributes:
        all: the result of the last `read`.
    """

    def __init__(self, read: Callable[[], Sequence[Gradient]], marked: bool = True,
                 adding: Optional[Callable[[], List[Array]]] = None) -> None:
        self.all: Sequence[Gradient] = []
        self.marked = marked
        self._read, self._adding, self._lock = read, adding, _Lock()
        self._squares: List[Squares] = []  # the last ones
        self.forget()

    def forget(self) -> None:
        """Forgets what backward passes and other code have written."""
        # gradients that only this package may write, their counts of writes, and those since
        self._guarded: Tuple[Sequence[Gradient], Optional[Array]] = [], None
        self._writes: List[Tuple[Sequence[Gradient], Array]] = []
        for gradient in self.all:
            gradient.is_new, gradient.array = False, gradient.own

    @contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """Runs the calls of several threads one after another."""
        if not self._lock.lock.acquire(timeout=_LONGEST):
            refusals.waited(call, _LONGEST)
        try:
            yield
        finally:
            self._lock.lock.release()

    def read(self) -> Sequence[Gradient]:
        """Returns all gradients."""
        self.all = self._read()
        return self.all

    def new(self) -> List[Gradient]:
        """Returns those of backward passes since the last step."""
        return [gradient for gradient in self.all if gradient.is_new]

    def find_new(self, scaled: bool) -> List[Gradient]:
        """Returns the same; unless they are `scaled`, also those of backward passes by other code.
        """
        if not (scaled and self.marked):
            for gradient, is_marked in zip(self.read(), self.marks()):
                gradient.is_new = bool(is_marked)
        return self.new()

    def marks(self, clear: bool = False) -> Sequence[int]:
        """Returns whether backward passes have written each gradient since the marks were cleared.
        """
        return marks([g.weight for g in self.all], clear) if self.marked else [True] * len(self.all)

    def added(self) -> List[Array]:
        """Returns the arrays to which backward passes add."""
        return self._adding() if self._adding else [g.own for g in self.all if g.adds]

    # ---- writes of other code

    def guard(self) -> None:
        """Counts the writes of other code to new gradients from now on."""
        new = self.new()
        self._guarded = new, versions([g.own for g in new]) if new else None

    def count_writes(self) -> None:
        """Ends the count, before this package writes or uses gradients, without waiting for it."""
        gradients, before = self._guarded
        if before is not None:
            writes = versions([g.own for g in gradients], since=before)
            assert writes is not None  # because `before` was not None
            self._writes.append((gradients, writes))
        self._guarded = [], None

    def written(self) -> List[str]:
        """Returns the names of gradients that other code has written."""
        return [g.name for gradients, counts in self._writes
                for g, count in zip(gradients, read(counts)) if count]

    # ---- their norm

    def check(self, some: Sequence[Gradient], averages: Optional[MovingAverages] = None,
              once: bool = False) -> Callable[[], Tuple[float, Sequence[str]]]:
        """Computes the sum of squares of some gradients and of copies of moving averages, without
        waiting. Returns a function that waits, checks these copies, and returns the norm of all
        these gradients together, and the names of those that are not finite.

        Args:
            some: the gradients.
            averages: the moving averages.
            once: whether all devices have the same gradient, which counts once.
        """
        count = len(some)
        checked = [*(g.array for g in some), *(averages.unchecked() if averages else ())]
        sums = next((s for s in self._squares if same_objects(s.arrays, checked)), None)
        if sums is None:
            sums = Squares(checked)
            if all(gradient.array is gradient.own for gradient in some):
                self._squares = [sums, *self._squares[:1]]  # averages have two copies
        sums.start()

        def result() -> Tuple[float, Sequence[str]]:
            numbers = sums.read()
            if averages is not None:
                averages.check(np.isfinite(numbers[count:]).tolist())
            each: Any = numbers[:count].tolist()
            if once:
                each = {gradient.key: number for gradient, number in zip(some, each)}.values()
            norm = math.sqrt(sum(each))
            names = [] if math.isfinite(norm) else [g.name for g in some]
            return norm, names and not_finite(names, numbers[:count])
        return result


class _Lock:
    """A lock. A copy is another lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> Any:
        return _Lock, ()


def set_to_zero(arrays: Iterable["mx.nd.NDArray"]) -> None:
    """Sets gradients to 0; MXNet's `zero_grad` fails in numpy mode."""
    for array in arrays:
        classic = array.as_nd_ndarray()
        mx.nd.zeros_like(classic, out=classic)


def clear_added(parameters: Sequence["mx.gluon.Parameter"]) -> None:
    """Sets accumulated gradients to 0."""
    set_to_zero(gradient for parameter in parameters if parameter.grad_req == "add"
                for gradient in parameter._grad or ())


def are_zero(gradients: Sequence[Gradient]) -> bool:
    """Whether all elements of all gradients are 0."""
    return not squares([gradient.own for gradient in gradients]).any()


def in_turn(method: Method) -> Method:
    """Runs calls of an object's method one after another, with a decided loss scale."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._step.gradients.turn(f"{method.__name__}()"):
            self._decide()
            return method(self, *args, **kwargs)
    return call  # type: ignore[return-value]
