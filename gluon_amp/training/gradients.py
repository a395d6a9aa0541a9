"""Gradients of parameters on devices."""
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

from .._mxnet import mx


@dataclass(eq=False)
class Gradient:
    """The gradient of one parameter on one device.

    Attributes:
        index: the parameter's, as the optimizer has it.
        name: the parameter's.
        device: the device's number.
        weight: the parameter's array.
        own: the gradient.
        array: for the update: the gradient or its replacement.
        adds: whether backward passes add to it.
        is_new: whether a backward pass has written it since the last step.
    """
    index: int
    name: str
    device: int
    weight: Any
    own: Any
    array: Any
    adds: bool
    is_new: bool = False


def set_to_zero(arrays: Iterable["mx.nd.NDArray"]) -> None:
    """Sets gradients to 0; MXNet's `zero_grad` fails in numpy mode."""
    for array in arrays:
        classic = array.as_nd_ndarray()
        mx.nd.zeros_like(classic, out=classic)


def clear_added(parameters: Sequence["mx.gluon.Parameter"]) -> None:
    """Sets accumulated gradients to 0."""
    set_to_zero(gradient for parameter in parameters if parameter.grad_req == "add"
                for gradient in parameter._grad or ())
