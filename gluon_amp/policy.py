"""Policies: which number format each part of a network has."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence, Union

from .checks import did_you_mean
from .formats import BFLOAT16, FLOAT16, FLOAT32, Format, get_format


@dataclass(frozen=True)
class Policy:
    """The number formats of a network, one for each role: "float32", "float16" or "bfloat16".

    Attributes:
        name: the name in errors and logs.
        parameter: the format of stored parameters.
        compute: the format of activations, of the inputs of convolutions, dense layers and other
            products, and of gradients.
        norm: the format in which norms compute: float32 or `compute`.
        sensitive: the format in which softmax, losses, exponentials and large sums compute:
            float32 or `compute`.
        batched: the format of the inputs of batched products (`batch_dot`, `np.matmul`): float32
            or `compute`. The default for float16 is float32, because MXNet accumulates these in
            float16 on a GPU; for others it is `compute`.
        output: the format of the network's result.
    """
    name: str
    parameter: Any = "float32"
    compute: Any = "float32"
    norm: Any = "float32"
    sensitive: Any = "float32"
    batched: Any = None
    output: Any = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a policy's name must be a string. Received: {self.name!r}")
        if self.batched is None:
            compute = get_format(self.compute, f"policy {self.name}: compute")
            object.__setattr__(self, "batched", FLOAT32 if compute == FLOAT16 else compute)
        for role in ("parameter", "compute", "output", "norm", "sensitive", "batched"):
            format_ = get_format(getattr(self, role), f"policy {self.name}: {role}")
            object.__setattr__(self, role, format_)
        for role in ("norm", "sensitive", "batched"):
            if getattr(self, role) not in (FLOAT32, self.compute):
                valid = " or ".join(dict.fromkeys(("float32", self.compute.name)))
                raise ValueError(f"policy {self.name}: {role} must be {valid}. "
                                 f"Received: {getattr(self, role).name}")

    @property
    def formats(self) -> Sequence[Format]:
        """The formats of its roles."""
        return (self.parameter, self.compute, self.norm, self.sensitive, self.batched, self.output)

    @property
    def is_float32(self) -> bool:
        """Whether all its formats are float32."""
        return set(self.formats) == {FLOAT32}

    @property
    def cpu_only(self) -> bool:
        """Whether a GPU lacks arrays of a format."""
        return BFLOAT16 in self.formats


Policy.__init__.__doc__ = "See the class for the arguments."
POLICIES = {policy.name: policy for policy in (
    Policy("float32"),
    Policy("float16", parameter="float16", compute="float16"),
    Policy("mixed_float16", compute="float16"),
    Policy("pure_float16", parameter="float16", compute="float16", norm="float16",
           sensitive="float16", output="float16", batched="float16"),
    Policy("bfloat16", parameter="bfloat16", compute="bfloat16"),
    Policy("mixed_bfloat16", compute="bfloat16"),
    Policy("tf32"),  # float32 arrays; a GPU's products round their inputs by themselves
)}
APEX = {"O0": "float32", "O1": "mixed_float16", "O2": "float16", "O3": "pure_float16"}
NAMES = (*POLICIES, *APEX)
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}


def get_policy(policy: Union[str, Policy]) -> Policy:
    """Returns the policy of a name; a `Policy` unchanged."""
    if isinstance(policy, Policy):
        return policy
    name = APEX.get(policy, policy) if isinstance(policy, str) else None
    if name not in POLICIES:
        hint = did_you_mean(_SHORT.get(name, name), NAMES) if name else ""
        raise ValueError(f"unknown policy. Valid: {', '.join(NAMES)}, or a "
                         f"gluon_amp.Policy. Received: {policy!r}{hint}")
    return POLICIES[name]
