"""The public API."""
import importlib
import re

import gluon_amp
import pytest
from mxnet.contrib.amp import amp as contrib_amp

PUBLIC = """
    convert restore freeze ops Policy
    Trainer AveragedWeights backward optimizer
    scale_loss StaticLossScale DynamicLossScale LossScaleError
    Module BucketingModule convert_symbol convert_model
    save_checkpoint load_checkpoint export_onnx lr_find report data
    xray explain Monitor
""".split()
ELSEWHERE = {"average_statistics": "gluon_amp.parallel", "Horovod": "gluon_amp.parallel",
             "KernelError": "gluon_amp.cpu.library",
             "Log": "gluon_amp.reports", "read_logs": "gluon_amp.reports",
             "RanksDifferError": "gluon_amp.parallel", "Speedometer": "gluon_amp.symbolic.module",
             "BatchProcessor": "gluon_amp.training.estimator"}


def test_public_names():
    assert sorted(gluon_amp.__all__) == sorted(PUBLIC)
    assert len(PUBLIC) <= 26
    assert all(hasattr(gluon_amp, name) for name in PUBLIC)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_names_report_their_module(name):
    with pytest.raises(AttributeError, match=f"from {ELSEWHERE[name]} import {name}$"):
        getattr(gluon_amp, name)
    assert hasattr(importlib.import_module(ELSEWHERE[name]), name)


@pytest.mark.parametrize(("name", "instead"), [
    ("autocast", r"gluon_amp\.convert"), ("GradScaler", r"gluon_amp\.Trainer"),
    ("Format", "bfloat16"), ("tensor_core_dot", "results/tensor_cores"),
    ("gpu_trace", "tests/software_gpu"), ("search", r"gluon_amp\.xray.*keep"),
    ("types", "gluon-amp types"), ("gradient_penalty", "example/gradient_penalty.py"),
    ("recipes", "example/recipes.py")])
def test_other_name_reports_what_to_use(name, instead):
    with pytest.raises(AttributeError, match=f"'{name}'.*{instead}"):
        getattr(gluon_amp, name)


@pytest.mark.parametrize("name", [n for n in contrib_amp.__all__ if n not in PUBLIC])
def test_contrib_amp_name_reports_its_replacement(name):
    with pytest.raises(AttributeError, match=r"contrib\.amp has\. (Use|No call is)") as caught:
        getattr(gluon_amp, name)
    named = re.findall(r"gluon_amp\.(\w+)", str(caught.value))
    assert named
    assert set(named) <= set(PUBLIC)


def test_unknown_name_raises_plain_attribute_error():
    with pytest.raises(AttributeError, match=r"has no attribute 'Trainr'$"):
        _ = gluon_amp.Trainr
