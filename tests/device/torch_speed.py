"""Measures PyTorch's steps beside those of speed.py: python torch_speed.py NETWORK ROWS"""
import sys
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


def network(name):
    if name == "resnet50":
        from torchvision.models import resnet50
        return resnet50(), torch.randn(128, 3, 224, 224)
    if name == "bert":
        return Bert(), torch.randint(0, 30522, (32, 128))
    return LSTM(), torch.randn(64, 64, 1024)


def measure(name, half):
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    net, data = (each.cuda() for each in network(name))
    if name == "resnet50":
        net, data = (each.to(memory_format=torch.channels_last) for each in (net, data))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=half)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16, enabled=half):
            loss = (net(data).float() ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(8):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / 20
    return {"ms": 1e3 * seconds, "samples": len(data) / seconds,
            "mib": torch.cuda.max_memory_reserved() / 2**20}


if __name__ == "__main__":
    print(torch.__version__, torch.cuda.get_device_name(0))
    for _ in range(3):
        for dtype in ("float32", "float16"):
            add(sys.argv[2], network=sys.argv[1], way=f"PyTorch {dtype}, channels-last",
                **measure(sys.argv[1], dtype == "float16"))
