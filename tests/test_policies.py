"""Policies: immutability, lookup by their names and apex's, refusal of unknown names."""
import dataclasses

import gluon_amp as amp
import pytest
from gluon_amp.policy import get_policy


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
    roles = found.parameter, found.activation, found.norm, found.sensitive, found.output
    assert (found.name, *(format_.name for format_ in roles)) == (name, *types)
    assert found.product == found.gradient == found.activation
    assert get_policy(found) is found


def test_apex_levels_name_policies():
    assert [get_policy(f"O{i}").name for i in range(4)] \
        == ["float32", "mixed_float16", "float16", "pure_float16"]


@pytest.mark.parametrize("name", ["O4", "half", "", None, 3, ["float16"]])
def test_unknown_policy_is_refused(name):
    with pytest.raises(ValueError, match=r"unknown policy\. Valid: float32, float16") as caught:
        get_policy(name)
    assert str(caught.value).endswith(f"Received: {name!r}")
