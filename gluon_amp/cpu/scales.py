"""What a network remembers of its float8 tensors: the largest number of each of the last ones."""
import itertools
from typing import Dict

from .._mxnet import mx
from .library import table

_numbers = itertools.count(1)


class Scales:
    """The histories of one network, which the engine keeps under a number (scaling.cc). A copy,
    or what a pickle holds, has histories of its own that go on from there."""

    def __init__(self) -> None:
        self.id = next(_numbers)

    def read(self) -> str:
        """All of them as text, as it stands when all that was asked for is done."""
        mx.nd.waitall()
        return table().scales(self.id).decode()

    def write(self, text: str) -> None:
        """Replaces all of them by what `read` has given."""
        mx.nd.waitall()
        table().set_scales(self.id, text.encode())

    def __getstate__(self) -> Dict[str, str]:
        return {"histories": self.read()}

    def __setstate__(self, state: Dict[str, str]) -> None:
        self.id = next(_numbers)
        self.write(state["histories"])

    def __deepcopy__(self, memo: object) -> "Scales":
        made = Scales()
        made.write(self.read())
        return made
