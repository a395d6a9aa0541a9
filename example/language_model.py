"""Trains a language model, a small GPT over characters, in float32, float16 or bfloat16.

    python language_model.py --dtype float16
    python language_model.py --text shakespeare.txt --steps 5000 --gpus 0

Without --text it trains on the English text of Python's help. At the end it generates a text.
bfloat16 runs on CPUs only.
"""
import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import command_line as cli
import gluon_amp as amp  # before mxnet
import mxnet as mx
import numpy as np
import recipes
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

VALIDATION_BATCHES = 4  # in each line of the log


class Attention(gluon.HybridBlock):
    """Causal multi-head self-attention."""

    def __init__(self, width, heads, length):
        super().__init__()
        self.heads, self.divisor = heads, math.sqrt(width // heads)
        with self.name_scope():
            self.qkv = nn.Dense(3 * width, flatten=False, in_units=width)
            self.out = nn.Dense(width, flatten=False, in_units=width)
            # representable in float16; its exponential is 0
            self.mask = self.params.get_constant("mask", -1e4 * np.triu(np.ones((length,) * 2), 1))

    def hybrid_forward(self, F, x, mask):
        def split(part):  # (batch, position, width) to (batch * heads, position, width / heads)
            part = F.reshape(part, (0, 0, self.heads, -1))
            return F.reshape(F.transpose(part, (0, 2, 1, 3)), (-3, 0, 0))

        q, k, v = map(split, F.split(self.qkv(x), 3, axis=-1))
        scores = F.batch_dot(q, k, transpose_b=True) / self.divisor
        weights = F.softmax(F.broadcast_add(scores, F.expand_dims(mask, 0)))
        heads = F.reshape(F.batch_dot(weights, v), (-4, -1, self.heads, 0, 0))
        return self.out(F.reshape(F.transpose(heads, (0, 2, 1, 3)), (0, 0, -3)))


class Layer(gluon.HybridBlock):
    """Attention and a two-layer MLP, each after a norm and with a residual connection."""

    def __init__(self, width, heads, length, dropout):
        super().__init__()
        with self.name_scope():
            self.norm1 = nn.LayerNorm(in_channels=width)
            self.norm2 = nn.LayerNorm(in_channels=width)
            self.attention, self.dropout = Attention(width, heads, length), nn.Dropout(dropout)
            self.dense = nn.HybridSequential()
            self.dense.add(nn.Dense(4 * width, flatten=False, in_units=width), nn.GELU(),
                           nn.Dense(width, flatten=False, in_units=4 * width))

    def hybrid_forward(self, F, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.dense(self.norm2(x)))


class GPT(gluon.HybridBlock):
    """Returns logits of each next character; the first and last layers share a weight."""

    def __init__(self, characters, width, layers, heads, length, dropout):
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(characters, width)
            self.positions = self.params.get("positions", shape=(1, length, width))
            self.layers = nn.HybridSequential()
            for _ in range(layers):
                self.layers.add(Layer(width, heads, length, dropout))
            self.norm = nn.LayerNorm(in_channels=width)
            self.scores = nn.Dense(characters, flatten=False, use_bias=False, in_units=width,
                                   params=self.embed.params)

    def hybrid_forward(self, F, x, positions):
        x = F.broadcast_add(self.embed(x), positions)
        return self.scores(self.norm(self.layers(x)))


def parse_flags(parser, arguments):
    """Adds the flags to a parser, and returns their values."""
    flag = parser.add_argument_group("network").add_argument
    flag("--layers", type=cli.positive_int, default=4, help="number of layers")
    flag("--heads", type=cli.positive_int, default=4, help="attention heads of a layer")
    flag("--width", type=cli.positive_int, default=128, help="width of the residual stream")
    flag("--length", type=cli.positive_int, default=64, help="context length in characters")
    flag("--dropout", type=cli.fraction, default=0.0, help="dropout rate of each layer")
    flag = parser.add_argument_group("training").add_argument
    flag("--text", help="file of a text to train on (default: Python's help)")
    flag("--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
         help="type of the network")
    flag("--batch-size", type=cli.positive_int, default=32, help="sequences in a step")
    flag("--steps", type=cli.positive_int, default=1000, help="number of updates")
    flag("--lr", type=cli.positive_float, default=1e-3, help="peak learning rate")
    flag("--warmup", type=cli.non_negative_int, default=100, help="number of warm-up steps")
    flag("--wd", type=cli.non_negative_float, default=0.1, help="weight decay of matrices")
    flag("--clip", type=cli.positive_float, default=1.0, help="maximum norm of the gradient")
    flag = parser.add_argument_group("output").add_argument
    flag("--log-interval", type=cli.positive_int, default=100,
         help="number of steps between two log lines")
    flag("--save", type=cli.new_file, help="file to save the parameters to")
    flag("--characters", type=cli.non_negative_int, default=200,
         help="number of characters to generate at the end")
    cli.add_device_flags(parser)
    args = parser.parse_args(arguments)
    if args.width % args.heads:
        parser.error(f"--width must be a multiple of --heads {args.heads}. Received: {args.width}")
    if len(args.gpus) > 1:
        parser.error("--gpus: this script uses one GPU")
    return args


def generate(net, start, count, device, rng):
    """Returns the numbers of `count` characters, each drawn from the network's prediction."""
    numbers = list(start)
    for _ in range(count):
        context = nd.array([numbers[-len(start):]], device)
        scores = net(context)[0, -1].asnumpy().astype(float)
        weights = np.exp(scores - scores.max())
        numbers.append(rng.choice(len(weights), p=weights / weights.sum()))
    return numbers[len(start):]


def main(arguments=None):
    """Trains with the flags, and prints a generated text."""
    parser = cli.Parser(__doc__)
    args = parse_flags(parser, arguments)
    device, = recipes.devices_of(args.gpus)
    recipes.seed_all(args.seed)

    # The text as numbers; the last tenth is for validation
    text = Path(args.text).read_text() if args.text else "".join(map(topics.get, sorted(topics)))
    alphabet = sorted(set(text))
    index_of = {character: i for i, character in enumerate(alphabet)}
    numbers = np.array([index_of[character] for character in text])
    training, validation = np.split(numbers, [len(numbers) * 9 // 10])
    if len(validation) <= args.length:
        parser.error(f"--text is too short: a tenth of it must have more than --length "
                     f"{args.length} characters. Received: {len(text)} characters")

    def random_batch(part, rng):
        """Returns sequences at random places of the text, and the same shifted by a character."""
        begins = rng.randint(len(part) - args.length, size=(args.batch_size, 1))
        sequences = part[begins + np.arange(args.length + 1)]
        return nd.array(sequences[:, :-1], device), nd.array(sequences[:, 1:], device)

    # Validation has random numbers of its own: the training does not depend on --log-interval
    training_rng, validation_rng = (np.random.RandomState(args.seed + i) for i in (0, 1))
    validation_batches = [random_batch(validation, validation_rng)
                          for _ in range(VALIDATION_BATCHES)]

    # The network, in the type of --dtype. Convert before the Trainer is created
    net = GPT(len(alphabet), args.width, args.layers, args.heads, args.length, args.dropout)
    net.initialize(mx.init.Normal(0.02), device)
    amp.convert(net, args.dtype)
    net.hybridize(static_alloc=True, static_shape=True)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

    # The Trainer updates float32 copies of 16-bit weights, because updates are often too small for
    # 16 bits. It clips the norm of the gradients as they are without the loss scale
    net.collect_params(".*(bias|gamma|beta|positions)").setattr("wd_mult", 0.0)
    schedule = mx.lr_scheduler.CosineScheduler(
        args.steps, args.lr, warmup_steps=min(args.warmup, args.steps - 1))
    trainer = amp.Trainer(net.collect_params(), "adamw",
                          {"learning_rate": args.lr, "lr_scheduler": schedule, "wd": args.wd,
                           "beta2": 0.95}, loss_scale=args.loss_scale, clip_norm=args.clip)
    print(f"{len(text)} characters, {len(alphabet)} of them different; "
          f"{sum(np.prod(p.shape) for p in net.collect_params().values())} parameters")

    total, start = 0.0, time.time()
    for step in range(1, args.steps + 1):
        data, label = random_batch(training, training_rng)
        with autograd.record():
            loss = loss_fn(net(data), label)
        # Multiplies gradients by the loss scale, so that small ones do not become 0 in float16
        trainer.backward(loss)
        # Unscales the gradients. If one overflowed, skips the update and lowers the scale
        trainer.step(args.batch_size)
        total = total + loss.mean()
        if step % args.log_interval == 0 or step == args.steps:
            steps = (step - 1) % args.log_interval + 1
            train_loss = total.asscalar() / steps  # waits for the steps
            seconds = time.time() - start
            losses = [loss_fn(net(data), label).mean().asscalar()
                      for data, label in validation_batches]
            print(f"step {step}: loss={train_loss:.4f} "
                  f"validation-loss={np.mean(losses):.4f} "
                  f"lr={trainer.learning_rate:.2e} loss-scale={trainer.loss_scale:g} "
                  f"skipped={trainer.skipped} {seconds / steps * 1e3:.0f} ms/step",
                  flush=True)
            total, start = 0.0, time.time()
    if args.save:
        net.save_parameters(args.save)

    # A continuation of the first characters of the validation
    generated = generate(net, validation[:args.length], args.characters, device, validation_rng)
    print("".join(alphabet[i] for i in generated))


if __name__ == "__main__":
    cli.run(main)
