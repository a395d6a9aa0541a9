"""The reference of the public API, as help() shows it: sentences, and types as they are written."""
import inspect
import pydoc
import re
from functools import cached_property

import gluon_amp
from gluon_amp import data, parallel
from gluon_amp.inspection.tensors import Tensor
from gluon_amp.inspection.view import View
from gluon_amp.reports.runs import Run
from gluon_amp.symbolic.module import Speedometer
from gluon_amp.tools.types import Row, Types
from gluon_amp.training.adamw import AdamW
from gluon_amp.training.estimator import BatchProcessor
from gluon_amp.training.lr_find import LearningRates

RESULTS = [LearningRates, Row, Run, Tensor, Types, View]  # of calls
PUBLIC = [*(getattr(gluon_amp, name) for name in gluon_amp.__all__),
          *(getattr(parallel, name) for name in parallel.__all__),
          data.Cast, data.CastIter, AdamW, BatchProcessor, Speedometer, *RESULTS]


def members(cls):
    """Methods and properties of a class, and its __init__, without those of MXNet."""
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        function = getattr(member, "fget", None) or getattr(member, "func", None) \
            or getattr(member, "__func__", member)
        if (not name.startswith("_") or name == "__init__" and cls not in RESULTS) \
                and inspect.isfunction(function) and function.__module__.startswith("gluon_amp"):
            yield f"{cls.__name__}.{name}", member, function


OBJECTS = [(each.__name__, each) for each in PUBLIC] + [
    (name, member if isinstance(member, (property, cached_property)) else function)
    for each in PUBLIC if inspect.isclass(each) for name, member, function in members(each)]


def annotations(each):
    """The annotations of a function or class as help() shows them."""
    signature = inspect.signature(each)
    return [inspect.formatannotation(annotation) for annotation in (
        *(parameter.annotation for parameter in signature.parameters.values()),
        signature.return_annotation)]


def test_help_begins_with_a_sentence():
    first = {name: (each.__doc__ or "").partition("\n")[0] for name, each in OBJECTS}
    assert len(first) > 150
    assert {name: line for name, line in first.items()
            if not re.fullmatch(r"[A-Z`].*[^.]\.", line) or "Initialize self" in line} == {}


def test_signatures_have_types_as_they_are_written():
    generated = re.compile(r"ForwardRef|mxnet\.|typing\.|NoneType|['\"]mx\.")
    assert {name: found for name, each in OBJECTS
            if inspect.isfunction(each) or inspect.isclass(each) and not issubclass(each, Exception)
            for found in annotations(each) if generated.search(found)} == {}


def test_help_of_a_function():
    text = pydoc.plain(pydoc.render_doc(gluon_amp.convert)).replace("'", "")
    assert "convert(net: Block, policy: Union[str, Policy, None] = None," in text
