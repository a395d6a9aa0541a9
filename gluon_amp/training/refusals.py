"""What a step refuses, and why it skips: errors and log messages."""
import logging
import math
from typing import Any, Callable, Collection, NoReturn, Sequence

from .._mxnet import np
from ..checks import in_names
from ..cpu.arrays import not_finite, squares, to_float32
from .loss_scale import LossScale, LossScaleError

log = logging.getLogger("gluon_amp")

PATIENCE = 16  # skipped steps in a row before an error if no scale can back off
_SEVERAL = 3  # skipped steps in a row before a warning if the scale backs off


def nothing_to_train() -> NoReturn:
    """Refuses a step without trained parameters."""
    raise RuntimeError("nothing to train: all parameters of this Trainer have grad_req='null'")


def no_gradients(call: str, of_trainer: bool) -> NoReturn:
    """Refuses a call without gradients of `trainer.backward`, or of a Module's."""
    remedy = "call trainer.backward(loss), not loss.backward(), before each step. With MXNet's " \
             "Estimator, pass batch_processor=BatchProcessor() of gluon_amp.training.estimator" \
             if of_trainer else \
             "call forward_backward(batch), or forward and backward, before each update"
    raise RuntimeError(f"{call} needs new gradients: {remedy}")


def stale(names: Sequence[str]) -> NoReturn:
    """Refuses gradients of earlier steps, with the class that gluon.Trainer raises."""
    raise UserWarning(f"backward has not computed the gradients{in_names(names)} since the last "
                      "step: the loss does not depend on them. If this is intended, call "
                      "step(batch_size, ignore_stale_grad=True)")


def other_pass(names: Sequence[str]) -> NoReturn:
    """Refuses gradients that another backward pass has written at an unknown scale."""
    raise RuntimeError(
        f"the gradients{in_names(dict.fromkeys(names))} were written by another backward pass: "
        "loss.backward() or another Trainer's backward pass with another loss scale. For several "
        "Trainers over one loss, call gluon_amp.backward(loss, [trainer, other]); else step "
        "before it, or call zero_grad() after it")


def other_scales(scales: Collection[float]) -> NoReturn:
    """Refuses a backward pass for Trainers whose gradients have different scales."""
    raise RuntimeError("these Trainers have had backward passes at different loss scales since "
                       "their last steps: call gluon_amp.backward for all of them, or step before. "
                       f"Received: {', '.join(map(str, sorted(scales)))}")


def written(names: Sequence[str], scale: float, unscaled: bool, of_trainer: bool) -> NoReturn:
    """Refuses gradients that other code has written since the backward pass."""
    where = in_names(dict.fromkeys(names))
    if unscaled:
        raise RuntimeError(f"the gradients{where} were written after trainer.unscale(), but the "
                           "update uses the arrays that unscale() returned. Modify those arrays")
    raise RuntimeError(
        f"the gradients{where} were written between the backward pass and the step. They are "
        f"multiplied by the loss scale, {scale:g}, which such a write ignores. "
        + ("To clip them, call trainer.clip_norm(max_norm, batch_size), or give clip_norm=. To "
           "change them, modify the arrays that trainer.unscale() returns"
           if of_trainer else "To clip them, give clip_norm="))


def summed(instead: str, unscaled: bool = False) -> NoReturn:
    """Refuses to sum gradients again, or to add to sums; or to sum `unscaled` ones."""
    if unscaled:
        raise RuntimeError("unscale() before the sum over devices and workers: call trainer."
                           "allreduce_grads(), then unscale(), then update(batch_size)")
    raise RuntimeError("the gradients have been summed since the last backward(), by "
                       f"allreduce_grads(): call {instead}")


def overwritten() -> NoReturn:
    """Refuses to compute the norm of gradients that later code has written."""
    raise RuntimeError("the gradients of the last step have been overwritten. Without a loss scale "
                       "and clip_norm, read gradient_norm before the next backward pass and before "
                       "zero_grad()")


def waited(call: str, seconds: float) -> NoReturn:
    """Refuses to wait longer for a call in another thread."""
    raise RuntimeError(f"{call} waited {seconds} seconds for another thread in a call of the same "
                       "Trainer or Module, such as a scale_loss() block that itself waits for this "
                       "thread")


def unscaled_twice() -> NoReturn:
    """Refuses a second `unscale`."""
    raise RuntimeError("unscale() was already called since the last backward(): use the gradients "
                       "that it returned")


def log_replaced_weights() -> None:
    """Logs why a step with gradients of earlier weights is skipped."""
    log.warning("step skipped: ranks had other weights, which are rank 0's now. Run the network "
                "once before you create the Trainer to avoid this")


def skip(in_a_row: int, overflowed: Sequence[str], loss_is_finite: bool, loss_scale: LossScale,
         used: float, circumstances: Callable[[], str]) -> LossScale:
    """Logs why a step is skipped. Returns the loss scale of the next step. Raises LossScaleError if
    no scale helps.

    Args:
        in_a_row: the number of skipped steps since the last update.
        overflowed: the names of gradients that are not finite.
        loss_is_finite: whether the losses of all ranks are finite.
        loss_scale: the loss scale of this step.
        used: the scale of its gradients.
        circumstances: returns what narrows down the cause.
    """
    names = in_names(overflowed)
    if not loss_is_finite:
        reason = "the loss itself is not finite at any loss scale: check the data. " \
                 "gluon_amp.explain(net, batch, loss_fn) names what overflows, and states " \
                 "if float32 is not finite either"
    elif loss_scale.changes:
        try:
            lowered = loss_scale.update(math.inf, used, overflowed)
        except LossScaleError as error:
            raise LossScaleError(f"{error}. {circumstances()}") from None
        # a dynamic scale skips single steps; several in a row are worth a warning
        several = in_a_row == _SEVERAL
        log.log(logging.WARNING if several else logging.INFO,
                "%s skipped%s: gradients not finite%s; loss scale %g -> %g",
                f"{_SEVERAL} steps" if several else "step", " in a row" if several else "",
                in_names(overflowed, most=1), used, lowered.scale)
        return lowered
    else:
        reason = f"gradients are not finite{names} at the loss scale {used:g}, which " \
                 "is static: lower it, or use loss_scale='dynamic'" if used != 1 else \
                 f"gradients are not finite{names}, without a loss scale"
        reason += ". gluon_amp.explain(net, batch, loss_fn, loss_scale) names the first node " \
                  "that is not finite"
    reason = f"{reason}. {circumstances()}"
    if in_a_row >= PATIENCE:
        raise LossScaleError(f"{in_a_row} steps skipped in a row: {reason}")
    # in a row, the reason is the same: the error at the end repeats it once
    log.log(logging.WARNING if in_a_row == 1 else logging.INFO, "step skipped: %s", reason)
    return loss_scale


def circumstances(gradients: Sequence[Any], losses: Sequence[Any], of_outputs: bool,
                  has_updated: bool) -> str:
    """Returns the mean of the losses, or of a Module's outputs, weights that are not finite, and
    whether the learning rate can be the cause: only if a step has updated."""
    numbers = [to_float32(loss).asnumpy().ravel() for loss in losses]
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.mean(np.concatenate(numbers), dtype=np.float64) if numbers else math.nan
    dense = [g for g in gradients if g.weight.stype == "default"]
    weights = not_finite([g.name for g in dense], squares([g.weight for g in dense]))
    cause = f"The weights are not finite{in_names(weights)}. " if weights else ""
    if has_updated:
        cause += "If the loss has grown, lower the learning rate"
    else:
        cause += "No step has updated the weights, so the learning rate is not the cause"
    return f"The mean of the {'outputs' if of_outputs else 'loss'} is {mean:.6g}. {cause}"
