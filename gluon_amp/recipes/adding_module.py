"""Large batches on small devices, with the Symbolic API."""
import itertools
from typing import Any

from ..symbolic.module import Module


class AddingModule(Module):
    """A Module that updates with the sum of the gradients of some batches.

    Args:
        batches: how many make an update.
    """

    def __init__(self, *args: Any, batches: int = 1, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.batches, self.added = batches, 0

    def bind(self, *args: Any, **kwargs: Any) -> None:
        super().bind(*args, **kwargs, grad_req="add" if self.batches > 1 else "write")

    def forward_backward(self, data_batch: Any) -> None:
        if self.added == 0 and self.batches > 1:
            for gradient in itertools.chain(*self._exec_group.grad_arrays):
                if gradient is not None:
                    gradient[:] = 0
        super().forward_backward(data_batch)

    def update(self) -> bool:
        self.added = (self.added + 1) % self.batches
        return self.added > 0 or super().update()
