"""The result of an X-ray: data, text and files. judge.py derives its advice, render.py its page."""
from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from ..files import new_folder, replace_text
from ..training.loss_scale import as_power
from . import render
from .judge import Finding, Overflow, Training, Window, window
from .layout import Flow
from .lines import xray_lines
from .tensors import Counts, Key, Tensor, add_counts, decibels

MOST_SAID = 10  # printed findings


@dataclass
class View:
    """The result of an X-ray.

    Attributes:
        findings: the nodes that the format does not suit: overflow first, gradients last.
        keep: the value for `convert(net, keep=view.keep)`, with which there are no findings.
        first_overflow: the first tensor that is not finite; None if all are finite.
        loss_scale: (low, high) of `window`; low is above high if no scale fits all gradients.
        window: the loss scales that fit, with the tensors that limit them.
        after: the X-ray of the network with `keep`; None if nothing is to keep.
        notes: further results as sentences.
        tensors: all tensors, in order of computation.
        weights: the parameters that train.
        losses: the loss of each step.
        reference_losses: the loss of each float32 step.
        steps: for each step, its loss scale, and counts by tensor.
        left_out: the indices of batches without advice, because data, parameters or the float32
            loss are not finite.
        outcome: what the training does, the start of `verdict`.

    Internal:
        goes_forward: whether no forward tensor overflows.
        numbers: for each step, the number of its batch.
        scale: the loss scale of the gradients' counts: that of the first step with finite
            gradients, or 2^16.
        converts: the call that converts, up to `keep`, such as "amp.convert(net".
        training: the training's loss scales, and whether it checks gradients.
        one_step: whether this is the result of `explain`, which gives no advice.
    """
    name: str
    tensors: List[Tensor]
    weights: List[Tensor] = field(default_factory=list)
    window: Optional[Window] = None
    findings: List[Finding] = field(default_factory=list)
    keep: List[Any] = field(default_factory=list)
    first_overflow: Optional[Overflow] = None
    losses: List[float] = field(default_factory=list)
    reference_losses: List[float] = field(default_factory=list)
    steps: List[Tuple[float, Mapping[Key, Counts]]] = field(default_factory=list)
    numbers: List[int] = field(default_factory=list)
    scale: float = 0.0
    left_out: List[int] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    converts: str = "amp.convert(net"
    goes_forward: bool = True
    training: Training = field(default_factory=Training)
    outcome: str = ""
    one_step: bool = False
    after: Optional[View] = None

    @property
    def advising(self) -> List[Tuple[float, Mapping[Key, Counts]]]:
        """The steps that are not left out."""
        return [step for i, step in enumerate(self.steps) if i not in self.left_out]

    def add(self, number: int, scale: float, counts: Mapping[Key, Counts], loss: float) -> None:
        """Adds the step on the batch of this number, and frees the samples of its counts."""
        for held in counts.values():
            held.sample = None
        self.losses.append(loss)
        self.steps.append((scale, counts))
        self.numbers.append(number)

    def add_up(self) -> None:
        """Sets the tensors' counts to the sums of these steps.

        Gradients are at one loss scale, except those that a loss operator starts.
        """
        total: Dict[Key, Counts] = {}
        scaled = {t.key for t in self.tensors if t.key.backward and not t.begins}
        for at, counts in self.advising:
            add_counts(total, {key: held.times(self.scale / at) if key in scaled else held
                               for key, held in counts.items()})
        for tensor in self.tensors:
            tensor.counts = total.get(tensor.key)

    @property
    def windows(self) -> List[Optional[Window]]:
        """The loss scales that fit each step; None if a forward tensor overflows."""
        return [window(self.tensors, [step]) if Flow(self.tensors, step[1]).goes_forward else None
                for step in self.steps]

    @property
    def loss_scale(self) -> Optional[Tuple[float, float]]:
        """The lowest and the highest loss scale that fit, or None."""
        return self.window and self.window[:2]

    @property
    def keep_line(self) -> str:
        """The line of code that converts the network with `keep`."""
        return f"{self.converts}, keep={self.keep!r})"

    @property
    def gives_no_advice(self) -> bool:
        """Whether no batch is finite in float32."""
        return bool(self.steps) and len(self.left_out) == len(self.steps)

    @property
    def severity(self) -> str:
        """The worst severity of the findings."""
        if self.one_step:
            return "error" if self.first_overflow else "good"
        severities = {finding.severity for finding in self.findings}
        if self.window and self.window.low > self.window.high:
            severities.add("error")
        elif self.window and self.window.low > self.training.largest:
            severities.add("warning")
        if self.gives_no_advice:
            return "note"
        return next((kind for kind in ("error", "warning") if kind in severities), "good")

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.one_step:
            return f"The step is {'not finite' if self.first_overflow else 'finite'}, with the " \
                   f"loss scale {as_power(self.scale)}"
        if self.gives_no_advice:
            return "No verdict: no batch is finite in float32"
        nodes = len({finding.node for finding in self.findings if not finding.remedy})
        other = next((f for f in self.findings if f.remedy), None)
        if other is not None and (not nodes or not other.backward):  # the data, or all gradients
            return f"{self.outcome}: {other.remedy if other.backward else other.text}"
        operators = "1 operator needs" if nodes == 1 else f"{nodes or 'no'} operators need"
        where = f"; overflow begins in {self.first_overflow.node}" \
            if self.first_overflow and nodes else ""
        return f"{self.outcome}: {operators} float32 beyond those that the policy keeps{where}"

    def messages(self) -> List[Tuple[str, str, str]]:
        """Returns the lines of the result as (kind, subject, text).

        Kinds are "verdict", "good", "error", "warning", "note" and "keep".
        """
        lines = [("verdict", "", self.verdict)] if self.steps else []
        if self.first_overflow:
            kind = "error" if self.findings or self.one_step else "note"
            lines.append((kind, "First overflow", str(self.first_overflow)))
        if self.window:
            about, fits = str(self.window).split(": ", 1)
            lines.append(("good" if self.window.low <= self.window.high else "error", about, fits))
        lines += [("note", "", note) for note in self.notes]
        lines += [(f.severity, f.node, f"{f.reason}: {f.text}") for f in self.findings[:MOST_SAID]]
        if self.keep:
            lines.append(("keep", "To keep in float32", self.keep_line))
        return lines

    def inherited(self, tensor: Tensor) -> Optional[float]:
        """Returns a tensor's SNR in dB without its own rounding error."""
        if tensor.snr is None or tensor.counts is None:
            return None
        total, own = 10 ** (-tensor.snr / 10), 10 ** (-tensor.counts.own_snr / 10)
        return decibels(1.0, max(total - own, 0.0))

    def worst(self) -> List[Tensor]:
        """Returns the tensors, the worst first: those that overflow, then by SNR."""
        def order(tensor: Tensor) -> Tuple[int, float]:
            counts = tensor.counts
            if not counts.stay_finite:  # overflow first; infinities without overflow last
                return (0, tensor.place) if counts.overflowed else (2, tensor.place)
            own = counts.own_snr if tensor.is_low else math.inf
            return 1, min(own, math.inf if tensor.snr is None else tensor.snr)
        return sorted((t for t in self.tensors if t.counts is not None), key=order)

    def save(self, folder: Union[str, os.PathLike[str]]) -> str:
        """Writes xray.html and xray.jsonl into a new folder.

        Returns:
            The path of the page.
        """
        folder = os.fspath(folder)
        if os.path.exists(folder):
            raise FileExistsError(f"{folder} exists: xray writes into a new folder")
        with new_folder(folder) as beside:
            replace_text(os.path.join(beside, "xray.html"), render.page(self))
            replace_text(os.path.join(beside, "xray.jsonl"), "".join(
                json.dumps(line, allow_nan=False) + "\n" for line in xray_lines(self)))
        return os.path.join(folder, "xray.html")

    def __str__(self) -> str:
        return "\n".join(
            (f"{kind}: " if kind in render.TAGGED else "") + (f"{about}: " if about else "") + line
            for kind, about, line in self.messages())
