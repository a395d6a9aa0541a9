"""Tracks the gradients that backward passes have written since the last step.

MXNet marks the weights whose gradients a backward pass writes. The marks are cleared after each
pass of `trainer.backward`, so a mark at the step comes from another backward pass.
"""
from dataclasses import replace
from typing import Dict, List, NoReturn, Sequence, Tuple

from .._mxnet import mx
from ..checks import in_names
from ..cpu.finite import squares
from ..cpu.library import marks
from .step import Gradient, Place, Step


class Gradients:
    """The gradients of a Trainer's parameters."""

    def __init__(self, parameters: Sequence["mx.gluon.Parameter"], step: Step) -> None:
        self.parameters, self._step = parameters, step

    def begin(self) -> None:
        """Prepares a backward pass. The first of a step overwrites gradients of other passes,
        unless it adds to them; later passes of others are an error."""
        if self._step.begun:
            self.check_nobody_else()
            return
        marked = [place for place, _, is_marked in self._marked(clear=True) if is_marked]
        added = {p.name: p.list_grad()[device] for p, device in
                 ((self.parameters[i], device) for i, device in marked) if p.grad_req == "add"}
        if added and squares(list(added.values())).any():
            self._refuse(list(added))

    def note_written(self) -> None:
        """Records the gradients that a backward pass has written."""
        pending = self._step.pending
        pending.written, pending.stale = self._written(pending.written, clear=True)

    def note_used(self, gradients: Sequence[Gradient]) -> None:
        """Records the gradients that an update has used."""
        marks([g.weight for g in gradients], clear=True)

    def waiting(self) -> List[Gradient]:
        """Returns the pending gradients, if any."""
        return self.to_use() if self._step.pending.written else []

    def to_use(self, ignore_stale: bool = True) -> List[Gradient]:
        """Returns the gradients that the update uses, in the order of parameters."""
        pending = self._step.pending
        written, stale = (pending.written, pending.stale) if self._step.scaling \
            else self._written({})
        replacements = self._step.replacements
        gradients = [replace(g, array=replacements[place]) if place in replacements else g
                     for place, g in written.items()] if replacements else list(written.values())
        if stale and not (ignore_stale and gradients):
            # the class that gluon.Trainer raises
            raise UserWarning(f"backward has not computed the gradients{in_names(stale)} since "
                              "the last step: the loss does not depend on them. If that is "
                              "meant, call step(batch_size, ignore_stale_grad=True)")
        return gradients

    def check_new(self, call: str) -> None:
        """Refuses a call without gradients of `trainer.backward`."""
        if not self._step.scaling:
            return
        if not self._step.begun:
            self._weights()  # raises if there is nothing to train
            raise RuntimeError(f"{call} needs new gradients: call trainer.backward(loss), not "
                               "loss.backward(), before each step. With MXNet's Estimator, pass "
                               "batch_processor=BatchProcessor() of gluon_amp.training.estimator")
        self.check_nobody_else()

    def check_nobody_else(self) -> None:
        """Refuses gradients that another backward pass has written at an unknown scale."""
        names, pending = [], self._step.pending
        for place, weight, is_marked in self._marked():
            known = pending.written.get(place)
            if is_marked:
                names.append(self.parameters[place[0]].name)
            elif known is not None and known.weight is not weight:
                pending.stale.append(pending.written.pop(place).name)  # cast or moved since
        if names:
            self._refuse(names)

    def _refuse(self, names: Sequence[str]) -> NoReturn:
        self._step.forget()
        raise RuntimeError(f"the gradients{in_names(names)} were written by another backward pass: "
                           "loss.backward() or another Trainer's backward pass with another loss "
                           "scale. For several Trainers over one loss, call "
                           "gluon_amp.backward(loss, [trainer, other]); else step before it, or "
                           "call zero_grad() after it")

    def add_up(self) -> List["mx.nd.NDArray"]:
        """Returns the gradients to which each backward pass adds."""
        return [g for p in self.parameters if p.grad_req == "add" for g in p.list_grad()]

    def clear_added(self) -> None:
        """Sets these gradients to 0."""
        clear_added(self.parameters)

    def kept(self) -> List[Tuple["mx.nd.NDArray", "mx.nd.NDArray"]]:
        """Returns the gradients that a backward pass does not overwrite, with copies: accumulated
        ones, and those of earlier passes in this step."""
        gradients = [self.parameters[place[0]].list_grad()[place[1]] for place, _ in self._weights()
                     if self.parameters[place[0]].grad_req == "add"
                     or place in self._step.pending.written]
        return [(gradient, gradient.copy()) for gradient in gradients]

    def _written(self, known: Dict[Place, Gradient],
                 clear: bool = False) -> Tuple[Dict[Place, Gradient], List[str]]:
        """Returns the gradients that were written, and the names of the others."""
        written, stale = {}, []
        for place, weight, is_marked in self._marked(clear):
            parameter = self.parameters[place[0]]
            if is_marked:
                own = parameter.list_grad()[place[1]]
                written[place] = Gradient(parameter.name, place, weight, own, own)
            elif place in known:
                written[place] = known[place]
            else:
                stale.append(parameter.name)
        return written, stale

    def _marked(self, clear: bool = False) -> List[Tuple[Place, "mx.nd.NDArray", int]]:
        """Returns the weights, and whether MXNet has marked each."""
        weights = self._weights()
        marked = marks([weight for _, weight in weights], clear)
        return [(place, weight, mark) for (place, weight), mark in zip(weights, marked)]

    def _weights(self) -> List[Tuple[Place, "mx.nd.NDArray"]]:
        weights = [((i, device), weight) for i, p in enumerate(self.parameters)
                   if p.grad_req != "null" for device, weight in enumerate(p.list_data())]
        if not weights:
            raise RuntimeError("nothing to train: all parameters of this Trainer have "
                               "grad_req='null'")
        return weights


def clear_added(parameters: Sequence["mx.gluon.Parameter"]) -> None:
    """Sets accumulated gradients to 0."""
    for parameter in parameters:
        if parameter.grad_req == "add":
            set_to_zero(parameter)


def set_to_zero(parameter: "mx.gluon.Parameter") -> None:
    """Sets a parameter's gradients to 0; MXNet's `zero_grad` fails in numpy mode."""
    for gradient in parameter._grad or ():
        classic = gradient.as_nd_ndarray()
        mx.nd.zeros_like(classic, out=classic)
