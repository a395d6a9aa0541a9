"""What a network remembers of its float8 tensors: the largest number of each of the last ones."""
import itertools
import weakref
from typing import Any, Dict, Iterable, List, Sequence

from .._mxnet import mx
from .library import load, started, table

_numbers = itertools.count(1)


class Scales:
    """The histories of one network, which the engine keeps under a number (scaling.cc). A deep
    copy, or what a pickle holds, has histories of its own that go on from there.

    Where the engine does not run there are none: networks can be copied there all the same.

    Args:
        freed: whether the engine frees the histories some time after this object is gone.
    """

    def __init__(self, freed: bool = True) -> None:
        self.id = next(_numbers)
        if freed:
            weakref.finalize(self, _forget, self.id).atexit = False

    def read(self) -> str:
        """All of them as text, as it stands when all that was asked for is done."""
        if not started():
            return ""
        mx.nd.waitall()
        return table().scales(self.id).decode()

    def write(self, text: str) -> None:
        """Replaces all of them by what `read` has given."""
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


def _forget(number: int) -> None:
    if started():
        table().forget_scales(number)


def scales_of(parameters: Iterable[Any]) -> List[Scales]:
    """Those of the networks that have these parameters, each once, in their order. `convert` gives
    them to parameters where the policy's scaling is "delayed"."""
    found = (getattr(p, "scales_of_gluon_amp", None) for p in parameters)
    return list(dict.fromkeys(one for one in found if one is not None))


def for_devices(text: str, devices: Sequence[int]) -> str:
    """Histories for CPUs of these numbers, from a text that may be of others: a device that it
    lacks gets those of the first one."""
    known: Dict[int, List[str]] = {}
    for line in text.splitlines():
        history, _, device = line.rpartition(" cpu")
        known.setdefault(int(device), []).append(history)
    first = known[min(known)] if known else []
    return "".join(f"{history} cpu{device}\n" for device in sorted(set(devices))
                   for history in known.get(device, first))
