"""Policies: which type parameters, arithmetic, norms and outputs have."""
from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True)
class Policy:
    """The types of a network's parts.

    Attributes:
        name: how errors and logs call it.
        parameter: the type that parameters are stored in.
        compute: the type of convolutions, products and what lies between them.
        norm: the type of normalizations, and of their parameters.
        sensitive: the type of softmax, losses, exponents and large sums.
        output: the type that the network returns.
    """
    name: str
    parameter: str = "float32"
    compute: str = "float32"
    norm: str = "float32"
    sensitive: str = "float32"
    output: str = "float32"


POLICIES = {policy.name: policy for policy in (
    Policy("float32"),
    Policy("float16", parameter="float16", compute="float16"),
    Policy("mixed_float16", compute="float16"),
    Policy("pure_float16", *["float16"] * 5),
    Policy("mixed_bfloat16", compute="bfloat16"),
)}
APEX = {"O0": "float32", "O1": "mixed_float16", "O2": "float16", "O3": "pure_float16"}


def get_policy(policy: Union[str, Policy]) -> Policy:
    """The policy of that name; a `Policy` is returned as it is."""
    if isinstance(policy, Policy):
        return policy
    name = APEX.get(policy, policy) if isinstance(policy, str) else None
    if name not in POLICIES:
        raise ValueError(f"unknown policy. Valid: {', '.join([*POLICIES, *APEX])}, or a "
                         f"gluon_amp.Policy. Received: {policy!r}")
    return POLICIES[name]
