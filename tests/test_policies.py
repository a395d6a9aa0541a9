"""Policies: immutability, lookup by their names and apex's, refusal of unknown names."""
import dataclasses
import json

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.policy import get_policy
from mxnet import gluon, nd
from networks import ready


def test_policies_are_frozen():
    mine = amp.Policy("mine", compute="float16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.compute = "float32"
    assert mine == amp.Policy("mine", compute="float16")
    assert len({mine, amp.Policy("mine", compute="float16")}) == 1


@pytest.mark.parametrize(("name", "types"), [
    ("float32", ("float32",) * 5),
    ("float16", ("float16", "float16", "float32", "float32", "float32")),
    ("mixed_float16", ("float32", "float16", "float32", "float32", "float32")),
    ("pure_float16", ("float16",) * 5),
    ("bfloat16", ("bfloat16", "bfloat16", "float32", "float32", "float32")),
    ("mixed_bfloat16", ("float32", "bfloat16", "float32", "float32", "float32"))])
def test_policy_is_found_by_name(name, types):
    found = get_policy(name)
    roles = found.parameter, found.compute, found.norm, found.sensitive, found.output
    assert (found.name, *(format_.name for format_ in roles)) == (name, *types)
    assert get_policy(found) is found


def test_apex_levels_name_policies():
    assert [get_policy(f"O{i}").name for i in range(4)] \
        == ["float32", "mixed_float16", "float16", "pure_float16"]


@pytest.mark.parametrize("name", ["O4", "half", "", None, 3, ["float16"]])
def test_unknown_policy_is_refused(name):
    with pytest.raises(ValueError, match=r"unknown policy\. Valid: float32, float16") as caught:
        get_policy(name)
    assert f"Received: {name!r}" in str(caught.value)


@pytest.mark.parametrize(("name", "near"), [
    ("fp16", "float16"), ("bf16", "bfloat16"), ("half", "float16"),
    ("mixed_float15", "mixed_float16")])
def test_misspelled_policy_has_a_hint(name, near):
    with pytest.raises(ValueError, match=f"Did you mean.*{near}"):
        amp.convert(gluon.nn.Dense(2), name)


@pytest.mark.parametrize(("roles", "words"), [
    ({"compute": "float8_e4m3"}, ["compute must be", "'float8_e4m3'"]),
    ({"parameter": "float64"}, ["parameter must be", "'float64'"]),
    ({"compute": "float16", "norm": "bfloat16"}, ["norm must be float32 or float16", "bfloat16"]),
    ({"compute": "bfloat16", "sensitive": "float16"}, ["sensitive must be float32 or bfloat16"]),
    ({"batched": "float16"}, ["batched must be float32.", "float16"])])
def test_roles_are_checked(roles, words):
    with pytest.raises(ValueError, match="policy mine: ") as error:
        amp.Policy("mine", **roles)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize("name", ["", None, 8, ["mine"]])
def test_policy_requires_a_name(name):
    with pytest.raises(ValueError, match="a policy's name must be a string"):
        amp.Policy(name)


def test_behaviour_depends_on_roles_and_not_on_the_name():
    net = ready(gluon.nn.Dense(2, in_units=3))
    amp.convert(net, amp.Policy("any", parameter="float16", compute="float16"))
    assert net.weight.data().dtype == np.float16
    assert net(nd.ones((1, 3))).dtype == np.float32


def test_tf32_is_float32():
    outputs = []
    for policy in ("float32", "tf32"):
        mx.random.seed(1)
        net = amp.convert(ready(gluon.nn.Dense(2, in_units=300), mx.init.Normal(1)), policy)
        assert net.weight.data().dtype == np.float32
        outputs.append(net(nd.arange(300).reshape((1, 300)) / 300).asnumpy())
    assert np.array_equal(*outputs)


@pytest.mark.parametrize("policy", ["mixed_float8", {"name": "mine", "accumulate": "V100"}])
def test_record_of_a_policy_that_no_longer_exists_is_refused_by_its_name(policy, tmp_path):
    file = str(tmp_path / "net.params")
    net = ready(amp.convert(gluon.nn.Dense(2, in_units=3), "bfloat16"))
    net.save_parameters(file)
    record = json.loads((tmp_path / "net.params.json").read_text())
    record["policies"] = {"": policy}
    (tmp_path / "net.params.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="does not exist") as error:
        net.load_parameters(file)
    assert repr(policy if isinstance(policy, str) else "mine") in str(error.value)
