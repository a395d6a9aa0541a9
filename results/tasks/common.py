"""Common code of the tasks: the arms of a study, text, and the log of a run.

    python results/tasks/TASK.py --arm float16 --seed 0 --save-dir FOLDER

writes FOLDER/log.jsonl: the arguments, the loss of each 20 steps, and the task's measure.
"""
import argparse
import json
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics

import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "example")]
from observe import nudge_trainer  # noqa: E402

ARMS = ("float32", "control", "float16", "bfloat16", "cast")
STATIC = 128.0  # the loss scale of `cast`: net.cast("float16") with gluon.Trainer


class Run:
    """A training in one arm, and its log."""

    def __init__(self, description):
        parser = argparse.ArgumentParser(description=description.splitlines()[0])
        parser.add_argument("--arm", choices=ARMS, default="float32")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--save-dir", type=Path, required=True)
        parser.add_argument("--gpus", type=int, metavar="N", help="the GPU that trains")
        parser.add_argument("--steps", type=int, help="fewer steps than the task's, for a trial")
        args = parser.parse_args()
        self.arm, self.seed, self._steps = args.arm, args.seed, args.steps
        args.save_dir.mkdir(parents=True)
        self._log = args.save_dir / "log.jsonl"
        self._write(arm=args.arm, seed=args.seed)
        if args.gpus is not None:
            mx.gpu(args.gpus).__enter__()  # the context of all arrays of this process
        mx.random.seed(args.seed)
        random.seed(args.seed)
        self.rng = np.random.RandomState(args.seed)
        self.validation_rng = np.random.RandomState(args.seed + 1000)
        self._losses = []
        self._updates = 0
        self._trainers = []
        self._clip_norm = None  # of `cast`

    def steps(self, count):
        """Yields the numbers of the steps."""
        yield from range(self._steps or count)

    def convert(self, net, mixed=False):
        """Converts an initialized network to the arm's types; `mixed`: parameters stay float32."""
        if self.arm == "cast":
            net.cast("float16")
        elif self.arm in ("float32", "control"):
            amp.convert(net, "float32")
        else:
            amp.convert(net, f"mixed_{self.arm}" if mixed else self.arm)
        net.hybridize(static_alloc=True, static_shape=True)
        return net

    def trainer(self, net, optimizer, settings, clip_norm=None):
        """Returns the arm's Trainer."""
        if self.arm == "cast":
            self._clip_norm = clip_norm
            return gluon.Trainer(net.collect_params(), optimizer,
                                 {**settings, "multi_precision": True})
        self._trainers.append(amp.Trainer(
            net.collect_params(), optimizer, settings, clip_norm=clip_norm,
            loss_scale="dynamic" if self.arm == "float16" else None))
        return self._trainers[-1]

    def array(self, values):
        """Returns data of the type that the network reads."""
        return mx.nd.array(values, dtype="float16" if self.arm == "cast" else "float32")

    def update(self, trainer, loss, batch_size):
        """Runs the backward pass of a recorded loss, and an update."""
        if self.arm == "cast":
            autograd.backward(loss, mx.nd.full(loss.shape, STATIC, dtype=loss.dtype))
            trainer.step(batch_size * STATIC * self._clip(trainer, batch_size * STATIC))
        else:
            trainer.backward(loss)
            trainer.step(batch_size)
        self._updates += 1
        if self.arm == "control" and self._updates == 1:
            for each in self._trainers:
                nudge_trainer(each)
        self._losses.append(float(loss.mean().asscalar()))
        if len(self._losses) == 20:
            self._write(step=self._updates, loss=float(np.mean(self._losses)))
            self._losses = []

    def _clip(self, trainer, divisor):
        """Returns what divides the gradients of `cast`, too, so that their norm is at most that of
        the other arms."""
        if not self._clip_norm:
            return 1.0
        norms = [float(p.grad().astype("float32").norm().asscalar())
                 for p in trainer._params if p.grad_req != "null"]
        return max(1.0, float(np.linalg.norm(norms)) / divisor / self._clip_norm)

    def end(self, trainer, **measures):
        """Writes the task's measures."""
        self._write(step=self._updates, skipped=getattr(trainer, "skipped", 0), **measures)

    def _write(self, **line):
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Text:
    """The English text of Python's help as numbers; its last tenth is for validation."""

    def __init__(self, length, batch_size):
        self.length, self.batch_size = length, batch_size
        text = "".join(map(topics.get, sorted(topics)))
        self.alphabet = sorted(set(text))
        numbers = np.array([self.alphabet.index(character) for character in text[:200_000]])
        self.training, self.validation = np.split(numbers, [len(numbers) * 9 // 10])

    def batch(self, part, rng):
        """Returns sequences of a part, and the same shifted by one character."""
        begins = rng.randint(len(part) - self.length, size=(self.batch_size, 1))
        read = part[begins + np.arange(self.length + 1)]
        return mx.nd.array(read[:, :-1]), mx.nd.array(read[:, 1:])

    def train(self, run, net, trainer, steps):
        """Trains a converted language model; returns its validation loss."""
        loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
        for _ in run.steps(steps):
            data, label = self.batch(self.training, run.rng)
            with autograd.record():
                loss = loss_fn(net(data), label)
            run.update(trainer, loss, self.batch_size)
        batches = (self.batch(self.validation, run.validation_rng) for _ in range(20))
        return float(np.mean([loss_fn(net(data), label).mean().asscalar()
                              for data, label in batches]))
