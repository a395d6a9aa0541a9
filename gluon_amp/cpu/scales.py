"""Histories of the maxima of a network's float8 tensors, for delayed scaling."""
import itertools
import weakref
from typing import Any, Dict, Iterable, List, Sequence

from .._mxnet import mx
from .library import load, started, table

_numbers = itertools.count(1)


class Scales:
    """The histories of one network, which the engine stores under a number (scaling.cc).

    A deep copy or a pickle gets its own copy of the histories. Without the engine there are none.

    Args:
        freed: whether the engine frees the histories after this object is deleted.
    """

    def __init__(self, freed: bool = True) -> None:
        self.id = next(_numbers)
        if freed:
            weakref.finalize(self, _free, self.id).atexit = False

    def read(self) -> str:
        """Returns all histories as text, after all pending operations."""
        if not started():
            return ""
        mx.nd.waitall()
        return table().scales(self.id).decode()

    def write(self, text: str) -> None:
        """Replaces all histories by a result of `read`."""
        if not text and not started():
            return
        load()
        mx.nd.waitall()
        table().set_scales(self.id, text.encode())

    def __getstate__(self) -> Dict[str, str]:
        return {"histories": self.read()}

    def __setstate__(self, state: Dict[str, str]) -> None:
        Scales.__init__(self)
        self.write(state["histories"])


def _free(number: int) -> None:
    if started():
        table().forget_scales(number)


def scales_of(parameters: Iterable[Any]) -> List[Scales]:
    """Returns the histories of the networks with these parameters, each once, in their order. A
    network has some if its policy's scaling is "delayed"."""
    marks: List[Any] = [getattr(p, "converted_by_gluon_amp", None) for p in parameters]
    return list(dict.fromkeys(mark[1] for mark in marks if mark and mark[0].scaling == "delayed"))


def for_devices(text: str, devices: Sequence[int]) -> str:
    """Returns the text of histories for these device ids. A device that the text lacks gets the
    histories of the first one."""
    histories: Dict[int, List[str]] = {}
    for line in text.splitlines():
        history, _, device = line.rpartition(" cpu")
        histories.setdefault(int(device), []).append(history)
    first = histories[min(histories)] if histories else []
    return "".join(f"{history} cpu{device}\n" for device in sorted(set(devices))
                   for history in histories.get(device, first))
