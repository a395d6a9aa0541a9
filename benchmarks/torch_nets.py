"""Measures PyTorch's step under CPU autocast relative to float32: bfloat16, channels-last.

With `--compared` it measures the CPU time of gluon_amp's bfloat16 step relative to PyTorch's, eager
and by torch.compile, on one thread. All three alternate. It has six networks of networks.py, with
the layers, strides and biases of MXNet's model zoo, and so the same numbers of parameters.
"""
import argparse
import os
import time
from statistics import median

import harness
import torch
from bfloat16_time import processor_ms
from torch import nn

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
BFLOAT16 = "mixed_bfloat16"  # float32 parameters, as under autocast


def conv(inputs, outputs, kernel, stride=1, groups=1, bias=False):
    """A convolution with same padding, and its batch norm."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=bias),
            nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """activation(body(x) + shortcut(x))"""

    def __init__(self, body, shortcut=(), activation=None):
        super().__init__()
        self.body, self.shortcut = nn.Sequential(*body), nn.Sequential(*shortcut)
        self.activation = activation or nn.Identity()

    def forward(self, x):
        return self.activation(self.body(x) + self.shortcut(x))


def basic(inputs, outputs, stride):
    return [*conv(inputs, outputs, 3, stride), nn.ReLU(), *conv(outputs, outputs, 3)]


def bottleneck(inputs, outputs, stride):
    """A bottleneck of gluon's resnet50_v1: stride in the first convolution, biases in two."""
    width = outputs // 4
    return [*conv(inputs, width, 1, stride, bias=True), nn.ReLU(),
            *conv(width, width, 3), nn.ReLU(),
            *conv(width, outputs, 1, bias=True)]


def resnet(block, depths, widths):
    layers = [*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, (depth, width) in enumerate(zip(depths, widths)):
        for i in range(depth):
            stride = 2 if stage and not i else 1
            shortcut = conv(inputs, width, 1, stride) if inputs != width else ()
            layers.append(Residual(block(inputs, width, stride), shortcut, nn.ReLU()))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def mobilenetv2():
    layers = [*conv(3, 32, 3, 2), nn.ReLU6()]
    inputs = 32
    for expand, width, depth, first_stride in (
            (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2),
            (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)):
        for i in range(depth):
            stride, inner = 1 if i else first_stride, inputs * expand
            body = [*conv(inputs, inner, 1), nn.ReLU6(),
                    *conv(inner, inner, 3, stride, groups=inner), nn.ReLU6(),
                    *conv(inner, width, 1)]
            layers.append(Residual(body) if stride == 1 and inputs == width
                          else nn.Sequential(*body))
            inputs = width
    return nn.Sequential(*layers, *conv(inputs, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1),
                         nn.Conv2d(1280, 1000, 1, bias=False), nn.Flatten())


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(256, 256, num_layers=2)
        self.out = nn.Linear(256, 1000)

    def forward(self, x):
        try:
            hidden, _ = self.lstm(x)
        except RuntimeError:  # oneDNN has no float16 LSTM for this CPU: use PyTorch's
            with torch.backends.mkldnn.flags(enabled=False):
                hidden, _ = self.lstm(x)
        return self.out(hidden)


def transformer():
    return nn.TransformerEncoderLayer(256, nhead=4, dim_feedforward=1024, dropout=0,
                                      activation="gelu", batch_first=True)


class Bert(nn.Module):
    """BERT-base with a classifier of two classes on the first token."""

    def __init__(self, width=768, length=128):
        super().__init__()
        self.words = nn.Embedding(30522, width)
        self.places = nn.Parameter(torch.zeros(1, length, width))
        self.begin = nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.1))
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.end = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1),
                                 nn.Linear(width, 2))

    def forward(self, x):
        return self.end(self.layers(self.begin(self.words(x) + self.places))[:, 0])


NETS = {  # keys: the first words of names in networks.py
    "resnet50": lambda: resnet(bottleneck, (3, 4, 6, 3), (256, 512, 1024, 2048)),
    "resnet18": lambda: resnet(basic, (2, 2, 2, 2), (64, 128, 256, 512)),
    "mobilenetv2": mobilenetv2,
    "lstm": LSTM,
    "transformer": transformer,
    "bert-base": Bert,
}


def stepper(name, dtype, compiled=False):
    """Returns a function that trains one step. `dtype`: the type of autocast, or None."""
    torch.manual_seed(1)
    net = NETS[name.split()[0]]()
    data, _ = harness.NETWORKS[name].batch()
    data = torch.randint(30522, data.shape) if isinstance(net, Bert) else torch.randn(data.shape)
    if dtype == torch.bfloat16 and data.dim() == 4:
        net, data = (x.to(memory_format=torch.channels_last) for x in (net, data))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if compiled:
        net = torch.compile(net)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.float16, enabled=dtype is not None):
            loss = net(data).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def compared(name, budget):
    """Returns the CPU ms of a bfloat16 step, its ratios to PyTorch's steps, and the turns."""
    steps = [harness.stepper(name, BFLOAT16), stepper(name, torch.bfloat16),
             stepper(name, torch.bfloat16, compiled=True)]
    turns = []
    for step in steps:  # PyTorch compiles in its first step
        step()
    end = time.perf_counter() + budget
    while len(turns) < 3 or time.perf_counter() < end:
        turns.append([processor_ms(step) for step in steps])
    return (median(ours for ours, _, _ in turns), median(ours / eager for ours, eager, _ in turns),
            median(ours / compiled for ours, _, compiled in turns), len(turns))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run only networks with this text in their name")
    parser.add_argument("--seconds", type=float, default=20,
                        help="time for the pairs of a network (20)")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--compared", action="store_true",
                        help="gluon_amp's bfloat16 step relative to PyTorch's")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    columns = ("CPU ms, bfloat16", "over PyTorch", "over torch.compile", "turns") \
        if args.compared else ("float32 ms", f"{args.dtype} autocast / float32", "pairs")
    table = harness.Table("network", *columns, as_json=args.json)
    for name in harness.NETWORKS:
        if name.split()[0] not in NETS or args.only not in name:
            continue
        if args.compared:
            table.row(name, *compared(name, args.seconds))
        else:
            found = harness.ratios(stepper(name, None), stepper(name, dtype), budget=args.seconds)
            table.row(name, 1e3 * found.seconds, found.median, found.pairs)


if __name__ == "__main__":
    main()
