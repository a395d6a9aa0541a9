"""The public API."""
import importlib
import re

import gluon_amp
import pytest
from mxnet.contrib.amp import amp as contrib_amp

PUBLIC = """
    convert restore Policy Format
    Trainer backward optimizer scale_loss StaticLossScale DynamicLossScale LossScaleError
    Module BucketingModule convert_symbol convert_model
    export_onnx lr_find report read_logs data
    xray explain search types gpu_trace Monitor
    tensor_core_dot Horovod KernelError
""".split()
MOVED = {"average_statistics": "gluon_amp.parallel", "RankEndedError": "gluon_amp.parallel",
         "RanksDifferError": "gluon_amp.parallel", "Speedometer": "gluon_amp.symbolic.module",
         "BatchProcessor": "gluon_amp.training.estimator"}


def test_the_public_names_are_these():
    assert sorted(gluon_amp.__all__) == sorted(PUBLIC)
    assert len(PUBLIC) <= 30
    assert all(hasattr(gluon_amp, name) for name in PUBLIC)


@pytest.mark.parametrize("name", MOVED)
def test_a_name_that_has_moved_says_where_it_is(name):
    with pytest.raises(AttributeError, match=f"from {MOVED[name]} import {name}$"):
        getattr(gluon_amp, name)
    assert hasattr(importlib.import_module(MOVED[name]), name)


@pytest.mark.parametrize("name", [n for n in contrib_amp.__all__ if n not in PUBLIC])
def test_a_name_of_contrib_amp_says_what_stands_for_it(name):
    with pytest.raises(AttributeError, match=r"which mx\.contrib\.amp has\. Use") as caught:
        getattr(gluon_amp, name)
    named = re.findall(r"gluon_amp\.(\w+)", str(caught.value))
    assert named
    assert set(named) <= set(PUBLIC)


def test_a_name_that_never_was_is_an_ordinary_attribute_error():
    with pytest.raises(AttributeError, match=r"has no attribute 'Trainr'$"):
        _ = gluon_amp.Trainr
