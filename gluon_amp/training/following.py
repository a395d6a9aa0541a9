"""Synchronizes master weights with their weights on a GPU without reading them.

MXNet's engine counts the writes to each array (`library.versions`), without work on the device. If
only updates have written master weights and weights, each weight is its rounded master weight.
"""
from contextlib import contextmanager, nullcontext
from typing import Any, ContextManager, Dict, Hashable, Iterator, List, Optional, Sequence, Tuple

from ..annotations import Array, Optimizer
from ..cpu import library
from ..cpu.arrays import follow


class Following:
    """The numbers of writes to weights and master weights by one optimizer's updates."""

    def __init__(self) -> None:
        self._known: Dict[Any, Tuple[Sequence[Any], Any]] = {}

    def made(self, index: Hashable, master: Array, weight: Array) -> None:
        """Records that a master weight was created from its weight."""
        self.updated([index], [master], [weight])

    def follow(self, indices: Sequence[Any], masters: Sequence[Any],
               weights: Sequence[Any]) -> None:
        """Updates master weights before an update if others have written the weights."""
        written = self._written(indices, masters, weights)
        if written is None:  # not counted together
            one_by_one = [self._written(*map(list, zip(one)))
                          for one in zip(indices, masters, weights)]
            written = [one is None or one[0] for one in one_by_one]
        for master, weight, is_written in zip(masters, weights, written):
            if is_written:
                follow(master, weight)

    def updated(self, indices: Sequence[Any], masters: Sequence[Any],
                weights: Sequence[Any]) -> None:
        """Records the writes of an update."""
        arrays = [*masters, *weights]
        self._known[self._key(indices, weights)] = arrays, library.versions(arrays)

    @contextmanager
    def weights_unwritten(self) -> Iterator[None]:
        """Ignores writes during a backward pass, which writes no weight: MXNet counts a write in
        some static graphs (SSD's)."""
        before = {key: library.versions(arrays) for key, (arrays, _) in self._known.items()}
        yield
        for key, start in before.items():
            arrays, counts = self._known[key]
            meanwhile = library.versions(arrays, since=start)
            if counts is not None and meanwhile is not None:
                self._known[key] = arrays, counts + meanwhile

    def _written(self, indices: Sequence[Any], masters: Sequence[Any],
                 weights: Sequence[Any]) -> Optional[List[bool]]:
        """Returns whether each weight or its master weight was written since; None if unknown."""
        arrays = [*masters, *weights]
        known, counts = self._known.pop(self._key(indices, weights), ((), None))
        if counts is None or len(known) != len(arrays) \
                or not all(a is b for a, b in zip(known, arrays)):
            return None
        written = library.versions(arrays, since=counts)
        assert written is not None  # because `counts` was not None
        counted = written.asnumpy()
        return [bool(a or b) for a, b in zip(counted, counted[len(weights):])]

    @staticmethod
    def _key(indices: Sequence[Any], weights: Sequence[Any]) -> Hashable:
        return weights[0].ctx, tuple(indices)


def weights_unwritten(optimizer: Optimizer) -> ContextManager[None]:
    """Ignores writes to an optimizer's weights during a backward pass; see `Following`."""
    following = getattr(optimizer, "_following", None)
    return nullcontext() if following is None else following.weights_unwritten()
