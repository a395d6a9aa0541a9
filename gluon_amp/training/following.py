"""Masters follow their weights on a GPU without reading them.

MXNet's engine counts how often each array has been written (`library.versions`), which takes no
work of a device. Where masters and weights have been written by updates alone, each weight is still
its master rounded, and nothing is to be done.
"""
from contextlib import contextmanager, nullcontext
from typing import Any, ContextManager, Dict, Hashable, Iterator, List, Optional, Sequence, Tuple

from ..annotations import Array, Optimizer
from ..cpu import library
from ..cpu.arrays import follow


class Following:
    """How often the weights of one optimizer, and their masters, were written by its updates."""

    def __init__(self) -> None:
        self._known: Dict[Any, Tuple[Sequence[Any], Any]] = {}

    def made(self, index: Hashable, master: Array, weight: Array) -> None:
        """A master has been made of its weight."""
        self.updated([index], [master], [weight])

    def follow(self, indices: Sequence[Any], masters: Sequence[Any],
               weights: Sequence[Any]) -> None:
        """Before an update: takes over by value what somebody else has written."""
        written = self._written(indices, masters, weights)
        if written is None:  # not of these together
            one_by_one = [self._written(*map(list, zip(one)))
                          for one in zip(indices, masters, weights)]
            written = [one is None or one[0] for one in one_by_one]
        for master, weight, is_written in zip(masters, weights, written):
            if is_written:
                follow(master, weight)

    def updated(self, indices: Sequence[Any], masters: Sequence[Any],
                weights: Sequence[Any]) -> None:
        """After an update."""
        arrays = [*masters, *weights]
        self._known[self._key(indices, weights)] = arrays, library.versions(arrays)

    @contextmanager
    def weights_unwritten(self) -> Iterator[None]:
        """Around a backward pass. It writes no weight, but MXNet counts a write in some static
        graphs (SSD's): what is counted meanwhile is left out."""
        before = {key: library.versions(arrays) for key, (arrays, _) in self._known.items()}
        yield
        for key, start in before.items():
            arrays, counts = self._known[key]
            meanwhile = library.versions(arrays, since=start)
            if counts is not None and meanwhile is not None:
                self._known[key] = arrays, counts + meanwhile

    def _written(self, indices: Sequence[Any], masters: Sequence[Any],
                 weights: Sequence[Any]) -> Optional[List[bool]]:
        """Whether each weight, or its master, has been written since; None where no count is."""
        arrays = [*masters, *weights]
        known, counts = self._known.pop(self._key(indices, weights), ((), None))
        if counts is None or len(known) != len(arrays) \
                or not all(a is b for a, b in zip(known, arrays)):
            return None
        written = library.versions(arrays, since=counts)
        assert written is not None  # as it was not for `counts`
        counted = written.asnumpy()
        return [bool(a or b) for a, b in zip(counted, counted[len(weights):])]

    @staticmethod
    def _key(indices: Sequence[Any], weights: Sequence[Any]) -> Hashable:
        return weights[0].context, tuple(indices)


def weights_unwritten(optimizer: Optimizer) -> ContextManager[None]:
    """Around a backward pass through weights that this optimizer updates: see `Following`."""
    following = getattr(optimizer, "_following", None)
    return nullcontext() if following is None else following.weights_unwritten()
