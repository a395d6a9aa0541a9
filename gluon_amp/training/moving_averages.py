"""Moving averages stay finite on GPUs.

On a CPU the engine writes no infinity or NaN into a moving average (dispatch/moving_averages.h).
MXNet's kernels for GPUs do: after one batch with an overflow, all predictions would be NaN. Here a
copy of the averages follows each update. The next step checks it with its gradients; a skipped step
restores from it the averages that are not finite.
"""
from typing import Any, Callable, List, Sequence, Tuple

from .._mxnet import mx
from ..cpu.arrays import in_launches
from ..cpu.library import Attributes, Calls

Named = Sequence[Tuple[str, List[Any]]]  # names of averages, and their arrays on each device


class MovingAverages:
    """The moving averages of a Trainer or a Module.

    Args:
        read: returns the averages on GPUs.
    """

    def __init__(self, read: Callable[[], Named]) -> None:
        self._read = read
        self._devices: List[_OnDevice] = []

    def begin(self) -> None:
        """Copies the averages before the first forward pass."""
        if not self._devices:
            self._devices = [_OnDevice(arrays) for arrays in _by_device(self._read())]
            for device in self._devices:
                device.finite.read()

    def unchecked(self) -> List[Any]:
        """Returns the copies that `check` has not seen, one array for each device."""
        self._find()
        return [device.new.flat for device in self._devices if device.is_unchecked]

    def check(self, finite: Sequence[bool]) -> None:
        """Uses the unchecked copies from now on, if they are finite; `finite`: whether each is."""
        for device, is_finite in zip([d for d in self._devices if d.is_unchecked], finite):
            device.is_unchecked = False
            if is_finite:
                device.finite, device.new = device.new, device.finite
            else:  # although all gradients were finite
                device.restore()

    def copy(self) -> None:
        """Copies the averages after an update. The caller has waited for gradients, because MXNet's
        engine does not track what batch norms write."""
        for device in self._devices:
            device.new.read()
            device.is_unchecked = True

    def restore(self) -> None:
        """Restores the averages that are not finite."""
        for device in self._devices:
            device.restore()

    def _find(self) -> None:
        """Finds averages that were initialized since the last step, or moved."""
        named = self._read()
        arrays = _by_device(named)
        if [list(map(id, some)) for some in arrays] == \
                [list(map(id, device.arrays)) for device in self._devices]:
            return
        self._devices = [_OnDevice(some) for some in arrays]
        for device in self._devices:
            for (name, _), part in zip(named, device.finite.parts):
                part[:] = int(name.endswith("var"))  # as MXNet initializes them


class _OnDevice:
    """The averages on a device, a copy of their last finite values, and memory for the next."""

    def __init__(self, arrays: List[Any]) -> None:
        self.arrays = arrays
        self.finite, self.new = _Copy(arrays), _Copy(arrays)
        self.is_unchecked = False  # whether `new` has a copy that may not be finite

    def restore(self) -> None:
        for part, array in zip(self.finite.parts, self.arrays):
            lost = (1 - _is_finite(array)) * _is_finite(part)
            mx.nd.where(lost, part, array.as_nd_ndarray()).copyto(array)


class _Copy:
    """A copy of float32 arrays in one array; `parts` are its parts with the arrays' shapes."""

    def __init__(self, arrays: List[Any]) -> None:
        self.flat = mx.nd.zeros(sum(array.size for array in arrays), arrays[0].ctx)
        self.parts: List[Any] = []
        at = 0
        for array in arrays:
            self.parts.append(self.flat[at:at + array.size].reshape(array.shape))
            at += array.size
        # array - 0 * array, by the only operator of MXNet that writes many arrays in one launch
        launches = list(zip(in_launches(arrays), in_launches(self.parts)))
        name = "multi_sgd_update"
        self._calls = Calls([(name, [array for array in some for _ in range(2)], parts)
                             for some, parts in launches])
        self._attributes = [Attributes(name, num_weights=len(some), lrs=[0.0] * len(some),
                                       wds=[0.0] * len(some)) for some, _ in launches]

    def read(self) -> None:
        """Copies the arrays, 60 in one launch. An infinity becomes NaN."""
        self._calls.run(self._attributes)


def _is_finite(array: Any) -> Any:
    return mx.nd.contrib.isfinite(array.as_nd_ndarray())


def _by_device(named: Named) -> List[List[Any]]:
    return [list(arrays) for arrays in zip(*(on_devices for _, on_devices in named))]
