"""Runs with given accuracies, and reports of them, for tests of amp.report."""
import csv
import io
from html.parser import HTMLParser

import gluon_amp as amp
from gluon_amp.reports import Run
from gluon_amp.reports.compare import compare, groups
from gluon_amp.reports.runs import Epoch
from hypothesis import settings

RECIPE = {"model": "resnet50_v1b", "batch_size": 128, "num_gpus": 8, "num_epochs": 2, "wd": 0.0001}
NO_DEADLINE = settings(deadline=None, max_examples=60)


def made(dtype="float32", errors=(0.5, 0.25), speed=1000.0, seconds=3600.0, name="", **arguments):
    """A run as `read` returns it; with `name`, one whose log has no arguments."""
    epochs = {n: Epoch(top1=e, speed=speed, seconds=seconds) for n, e in enumerate(errors)}
    return Run(name or dtype, {} if name else {**RECIPE, "dtype": dtype, **arguments}, epochs)


def report(folder, *texts, names="abcdefgh", **kwargs):
    for name, text in zip(names, texts):
        (folder / f"{name}.log").write_text(text)
    page = amp.report([folder / f"{name}.log" for name, _ in zip(names, texts)], folder / "out",
                      **kwargs)
    return page, list(csv.DictReader(io.StringIO((folder / "out" / "summary.csv").read_text())))


def comparisons(*runs):
    return compare(groups(runs))


def seeds(dtype, ends, **arguments):
    """Runs of seeds 0, 1, ... that end with these accuracies in percent."""
    return [made(dtype, [0.9, 1 - end / 100], seed=seed, **arguments)
            for seed, end in enumerate(ends)]


class Page(HTMLParser):
    """The contents of an HTML page: tags, cells of tables, and text by tag."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells, self.texts = [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("th", "td"):
            self.cells.append("")
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)
        if "table" in self.open and self.cells and self.open[-1] in ("td", "button"):
            self.cells[-1] += data
