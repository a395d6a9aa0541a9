"""MXNet's `Estimator` with a `gluon_amp.Trainer`."""
from __future__ import annotations

from typing import Any, List, Tuple

from mxnet import autograd
from mxnet.gluon.contrib import estimator as mxnet_estimator

from .trainer import Trainer

Arrays = List[Any]  # one for each device


class BatchProcessor(mxnet_estimator.BatchProcessor):
    """Lets `gluon.contrib.estimator.Estimator` train with a `gluon_amp.Trainer`.

    MXNet's own batch processor goes backward from the loss without its scale.

        Estimator(net, loss, trainer=amp.Trainer(...), batch_processor=BatchProcessor())
    """

    def fit_batch(self, estimator: mxnet_estimator.Estimator, train_batch: Any,
                  batch_axis: int = 0) -> Tuple[Arrays, Arrays, Arrays, Arrays]:
        """Computes the scaled gradients of a batch; MXNet's estimator then takes the step."""
        trainer = estimator.trainer
        if not isinstance(trainer, Trainer):
            raise TypeError("BatchProcessor needs Estimator(..., trainer=). Valid: a "
                            f"gluon_amp.Trainer. Received: {type(trainer).__module__}."
                            f"{type(trainer).__name__}")
        data, label = self._get_data_and_label(train_batch, estimator.context, batch_axis)
        with autograd.record():
            predicted = [estimator.net(x) for x in data]
            loss = [estimator.loss(y_hat, y) for y_hat, y in zip(predicted, label)]
        trainer.backward(loss)
        return data, label, predicted, loss
