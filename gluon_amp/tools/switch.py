"""`python -m gluon_amp --dtype float16 train.py`: mixed precision for a script without an edit.

While the script runs, MXNet's Trainer and Module are gluon_amp's, `hybridize` converts the networks
of the Trainer, and `backward` is the Trainer's. A script with several Trainers, with several
backward passes for a step, or that reads scaled gradients, is refused with what to write instead.
"""
from __future__ import annotations

import inspect
import sys
from typing import Any, ContextManager, List, NoReturn
from weakref import ref

import mxnet as mx

from ..checks import listed, positive_number
from ..gluon.convert import convert
from ..gluon.converted import ConvertedBlock, blocks_in
from ..gluon.observe import replaced
from ..policy import Policy, get_policy
from ..symbolic.convert import convert_symbol
from ..symbolic.module import BucketingModule, Module
from ..training.loss_scale import GivenLossScale
from ..training.trainer import Trainer


class Switch:
    """Converts what a script trains.

    Attributes:
        trains: the script's one Trainer or Module; None before the script creates it.
    """

    def __init__(self, policy: Policy, loss_scale: GivenLossScale) -> None:
        self.policy, self.loss_scale = policy, loss_scale
        self.trains: Any = None
        self._hybridized: List[ref[Any]] = []
        self._passes = 0  # backward passes since the last step
        self.nested = False  # within a call that the switch has replaced
        self._gradients_scale = 1.0  # of the last backward pass

    def begin(self, trained: Any) -> None:
        """Notes the script's Trainer or Module when it begins to train."""
        if self.trains is not None and self.trains is not trained:
            self.refuse("the script has a second Trainer or Module that trains",
                        "for Trainers: amp.convert(net) for each network, amp.Trainer for each "
                        "gluon.Trainer, and amp.backward(loss, [trainer, ...]). For Modules: "
                        "amp.Module(amp.convert_symbol(symbol))")
        self.trains = trained

    def refuse(self, what: str, instead: str) -> NoReturn:
        raise RuntimeError(f"python -m gluon_amp --dtype {self.policy.name}: {what}. Write "
                           f"instead, after import gluon_amp as amp: {instead}")

    # ---- networks

    def hybridized(self, net: Any) -> None:
        """Notes a block that the script hybridizes, and converts it if the Trainer has it."""
        self._hybridized.append(ref(net))
        if isinstance(self.trains, Trainer):
            self.convert(self.trains._params)

    def convert(self, parameters: Any) -> None:
        """Converts the outermost hybridized blocks with some of these parameters."""
        trained = {id(p) for p in parameters}
        alive = [net for net in (one() for one in self._hybridized) if net is not None]
        nets = [net for net in alive
                if any(id(p) in trained for p in net.collect_params().values())]
        inner = {id(block) for net in nets for block in blocks_in(net) if block is not net}
        for net in nets:
            if id(net) not in inner and not isinstance(net, ConvertedBlock):
                convert(net, self.policy)
                inside = {id(p) for p in net.collect_params().values()} & trained
                self.tell(net.name, f" ({len(inside)} of {len(trained)} parameters)")

    def tell(self, name: str, share: str = "") -> None:
        print(f"gluon-amp: {name} trains in {self.policy.name}{share}", file=sys.stderr)

    # ---- steps

    def backward(self, losses: Any, head_grads: Any, retain_graph: bool, train_mode: bool) -> None:
        """Runs the Trainer's backward pass."""
        self._passes += 1
        if self._passes > 1:
            self.refuse("a second backward pass before trainer.step",
                        "amp.convert(net), amp.Trainer for gluon.Trainer, and trainer.backward("
                        "losses), with a list of the losses of all devices; or a call for each, to "
                        "accumulate gradients")
        if head_grads is not None or not train_mode:
            self.refuse("backward has head gradients or train_mode=False",
                        "amp.convert(net), amp.Trainer for gluon.Trainer, and trainer.backward("
                        "loss) of a loss that is the sum of products with the head gradients")
        if not any(isinstance(block, ConvertedBlock)
                   for block in (one() for one in self._hybridized)):
            names = [p.name for p in self.trains._params]
            self.refuse(f"the script hybridizes no network of the Trainer ({listed(names, 2)})",
                        "net.hybridize() before training; or amp.convert(net), which runs it as a "
                        "graph")
        with self.own_calls():
            self.trains.backward(losses, retain_graph)
        self._gradients_scale = self.trains.loss_scale

    def check_reads_gradients(self) -> None:
        """Refuses a read of gradients that are multiplied by a loss scale."""
        if self._gradients_scale != 1 and not self.nested:
            self.refuse(
                "the script reads gradients, which are multiplied by the loss scale, "
                f"{self._gradients_scale:g}. Valid: --loss-scale none after --dtype "
                f"{self.policy.name}, which scales nothing",
                "amp.convert(net), and amp.Trainer for gluon.Trainer, with clip_norm= to clip "
                "gradients; trainer.gradient_norm after trainer.step is their norm, and trainer."
                "unscale() between trainer.allreduce_grads() and trainer.update(batch_size) "
                "returns them unscaled")

    def own_calls(self) -> ContextManager[None]:
        """Leaves MXNet's functions as they are within the block."""
        return replaced(self, nested=True)

    def own_step(self) -> ContextManager[None]:
        """The same, for a step of the Trainer."""
        self._passes = 0
        return self.own_calls()


def install(name: str, loss_scale: str = "auto") -> Switch:
    """Replaces MXNet's classes and functions for the rest of the process.

    Args:
        name: a policy.
        loss_scale: "auto", "none", "dynamic" or a number, as for `Trainer`.

    Raises:
        ValueError: the policy or the loss scale is not valid.
    """
    switch = Switch(get_policy(name), _loss_scale(loss_scale))
    if not switch.policy.is_float32:
        _replace_functions(switch)
        _replace_classes(switch)
    return switch


def _loss_scale(text: str) -> GivenLossScale:
    if text in ("none", "auto", "dynamic"):
        return None if text == "none" else text
    try:
        number = float(text)
    except ValueError:
        raise ValueError("--loss-scale is auto, none, dynamic or a positive number. "
                         f"Received: {text}") from None
    return positive_number(number, "--loss-scale")


def _replace_functions(switch: Switch) -> None:
    for cls in (mx.gluon.Block, mx.gluon.HybridBlock):
        def hybridize(self: Any, *args: Any, original: Any = cls.hybridize, **kwargs: Any) -> None:
            nested = switch.nested
            with switch.own_calls():
                original(self, *args, **kwargs)
                if not nested and kwargs.get("active", args[0] if args else True):
                    switch.hybridized(self)

        cls.hybridize = hybridize

    def replace_backward(owner: Any) -> None:
        original = owner.backward
        signature = inspect.signature(original)

        def backward(*args: Any, **kwargs: Any) -> None:
            if not isinstance(switch.trains, Trainer) or switch.nested:
                original(*args, **kwargs)
                return
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            switch.backward(*bound.args)

        owner.backward = backward

    replace_backward(mx.autograd)
    replace_backward(mx.nd.NDArray)
    _refuse_reads_of_gradients(switch)


def _refuse_reads_of_gradients(switch: Switch) -> None:
    """Checks all that returns gradients to a script."""
    def checked(original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            switch.check_reads_gradients()
            return original(*args, **kwargs)
        return read

    parameter = mx.gluon.Parameter
    parameter.grad, parameter.list_grad = checked(parameter.grad), checked(parameter.list_grad)
    for array in (mx.nd.NDArray, mx.np.ndarray):
        array.grad = property(checked(array.grad.fget))


def _replace_classes(switch: Switch) -> None:
    class SwitchedTrainer(Trainer):
        """gluon_amp's Trainer of the networks that the script hybridizes."""

        def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
            switch.begin(self)
            given = list(params.values()) if hasattr(params, "values") else list(params)
            with switch.own_calls():
                switch.convert(given)
            super().__init__(params, *args, **{"loss_scale": switch.loss_scale, **kwargs})

        def step(self, *args: Any, **kwargs: Any) -> bool:
            with switch.own_step():
                return super().step(*args, **kwargs)

        def update(self, *args: Any, **kwargs: Any) -> bool:
            with switch.own_step():
                return super().update(*args, **kwargs)

        def allreduce_grads(self) -> None:
            with switch.own_calls():
                super().allreduce_grads()

    class Announced(mx.mod.BaseModule):
        """Tells which Module trains."""

        def init_optimizer(self, *args: Any, **kwargs: Any) -> None:
            switch.begin(self)
            kind = "Module" if isinstance(self, Module) else "BucketingModule"
            switch.tell(f"a {kind} of {listed(self.output_names)}")
            super().init_optimizer(*args, **kwargs)

    class SwitchedModule(Announced, Module):
        """gluon_amp's Module of the converted symbol."""

        def __init__(self, symbol: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(convert_symbol(symbol, switch.policy), *args,
                             **{"loss_scale": switch.loss_scale, **kwargs})

    class SwitchedBucketingModule(Announced, BucketingModule):
        """gluon_amp's BucketingModule of the converted symbols."""

        def __init__(self, sym_gen: Any, *args: Any, **kwargs: Any) -> None:
            def converted(key: Any) -> Any:
                symbol, *names = sym_gen(key)
                return (convert_symbol(symbol, switch.policy), *names)

            super().__init__(converted, *args, **{"loss_scale": switch.loss_scale, **kwargs})

    mx.gluon.Trainer = mx.gluon.trainer.Trainer = SwitchedTrainer
    mx.mod.Module, mx.mod.BucketingModule = SwitchedModule, SwitchedBucketingModule
