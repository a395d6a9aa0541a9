"""Measures PyTorch's steps and predictions beside those of speed.py.

    python torch_speed.py NETWORK ROWS
"""
import argparse
import statistics
import time

import torch
from rows import add
from torch import nn


class LSTM(nn.Module):
    """Two layers of 1,024."""

    def __init__(self, width=1024):
        super().__init__()
        self.lstm, self.out = nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, 10)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


class Bert(nn.Module):
    """BERT-base with a classifier on the first token."""

    def __init__(self, width=768, words=30522, length=128):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12)
        self.pooler, self.out = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        x = self.layers(self.norm(self.words(x) + self.places(places)))
        return self.out(torch.tanh(self.pooler(x[:, 0])))


class UNet(nn.Module):
    """As in benchmarks/networks.py: two convolutions at each level, down and up."""

    def __init__(self, channels=64, levels=4):
        super().__init__()
        widths = [channels << level for level in range(levels)]
        self.downs, self.joins, self.ups = (nn.ModuleList() for _ in range(3))
        for inputs, width in zip([3, *widths], widths):
            self.downs.append(convolutions(inputs, width))
        for width in widths[-2::-1]:
            self.joins.append(nn.ConvTranspose2d(2 * width, width, 2, 2))
            self.ups.append(convolutions(2 * width, width))
        self.pool, self.out = nn.MaxPool2d(2), nn.Conv2d(channels, 2, 1)

    def forward(self, x):
        kept = [self.downs[0](x)]
        for down in self.downs[1:]:
            kept.append(down(self.pool(kept[-1])))
        x = kept.pop()
        for join, up in zip(self.joins, self.ups):
            x = up(torch.cat([join(x), kept.pop()], 1))
        return self.out(x)


def convolutions(inputs, width):
    return nn.Sequential(*(part for channels in (inputs, width) for part in (
        nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        nn.ReLU(inplace=True))))


def network(name, batch):
    """A network and its batch."""
    if name == "bert":
        return Bert(), torch.randint(0, 30522, (batch or 32, 128))
    if name == "lstm":
        return LSTM(), torch.randn(batch or 64, 64, 1024)
    if name == "unet":
        return UNet(), torch.randn(batch or 16, 3, 224, 224)
    from torchvision import models
    make = {"resnet50": models.resnet50, "mobilenet": models.mobilenet_v2}[name]
    return make(), torch.randn(batch or 128, 3, 224, 224)


def measure(args, half):
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    net, data = (each.cuda() for each in network(args.network, args.batch))
    if data.dim() == 4:
        net, data = (each.to(memory_format=torch.channels_last) for each in (net, data))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=half)
    net.train(not args.predict)
    if args.compile:
        net = torch.compile(net)

    def step():
        if args.predict:
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16, enabled=half):
                net(data)
            return
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16, enabled=half):
            loss = (net(data).float() ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(8):
        step()
    torch.cuda.synchronize()
    found = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        found.append(1e2 * (time.perf_counter() - begin))
    ms = statistics.median(found)
    memory = torch.cuda.max_memory_reserved() / 2**20
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {"batch": len(data), "ms": ms, "blocks": found, "samples": 1e3 * len(data) / ms,
            "mib": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=("resnet50", "mobilenet", "unet", "bert", "lstm"))
    parser.add_argument("rows")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--types", nargs="+", default=("float32", "float16"))
    parser.add_argument("--compile", action="store_true", help="torch.compile, in float16")
    parser.add_argument("--predict", action="store_true")
    args = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(0))
    for _ in range(args.rounds):
        for dtype in ("float16",) if args.compile else args.types:
            way = f"PyTorch {dtype}, channels-last{', compiled' if args.compile else ''}"
            what = {"part": "prediction"} if args.predict else {}
            add(args.rows, network=args.network, way=way, **what,
                **measure(args, dtype == "float16"))


if __name__ == "__main__":
    main()
