"""Policies: which number format each part of a network has."""
from dataclasses import InitVar, dataclass
from typing import Any, Optional, Union

from .formats import FLOAT16, FLOAT32, Format, get_format

FormatOrName = Union[str, Format]


@dataclass(frozen=True)
class Policy:
    """The number formats of a network's parts, each a `gluon_amp.Format` or the name of one.

    Attributes:
        name: how errors and logs call it.
        parameter: what parameters are stored in: float32 or float16.
        product: what the inputs of convolutions, dense layers and other products are.
        between: what lies between the operators.
        gradient: what gradients are. Where `product` differs from `between`: the gradients that
            products read; all others are as `between`. If not given, as `product`.
        norm: what normalizations compute in: float32 or as `between`.
        sensitive: the same of softmax, losses, exponents and large sums.
        output: what the network returns: float32 or float16.
        compute: sets `product` and `between`.
    """
    name: str
    parameter: Any = "float32"
    compute: InitVar[Optional[FormatOrName]] = None
    norm: Any = "float32"
    sensitive: Any = "float32"
    output: Any = "float32"
    product: Any = None
    between: Any = None
    gradient: Any = None

    def __post_init__(self, compute: Optional[FormatOrName]) -> None:
        between = self._set("between", self.between or compute or "float32")
        product = self._set("product", self.product or compute or between)
        self._set("gradient", self.gradient or product)
        for role in ("parameter", "output"):
            self._one_of(role, (FLOAT32, FLOAT16))
        for role in ("norm", "sensitive"):
            self._one_of(role, (FLOAT32, between))

    def _set(self, role: str, given: FormatOrName) -> Format:
        made = get_format(given, f"policy {self.name}: {role}")
        object.__setattr__(self, role, made)
        return made

    def _one_of(self, role: str, valid: Any) -> None:
        if self._set(role, getattr(self, role)) not in valid:
            names = " or ".join(dict.fromkeys(v.name for v in valid))
            raise ValueError(f"policy {self.name}: {role} must be {names}. "
                             f"Received: {getattr(self, role).name}")

    @property
    def is_float32(self) -> bool:
        """Whether nothing in it differs from float32."""
        return all(role == FLOAT32 for role in (
            self.parameter, self.product, self.between, self.gradient, self.norm, self.sensitive,
            self.output))

    @property
    def one_format(self) -> bool:
        """Whether products, what lies between them, and gradients have one format."""
        return self.product == self.between == self.gradient

    @property
    def cpu_only(self) -> bool:
        """Whether a GPU has no arrays of some of its formats."""
        return not all(f.is_array_type for f in (self.product, self.between, self.gradient)) \
            or self.gradient != self.product


POLICIES = {policy.name: policy for policy in (
    Policy("float32"),
    Policy("float16", parameter="float16", compute="float16"),
    Policy("mixed_float16", compute="float16"),
    Policy("pure_float16", parameter="float16", compute="float16", norm="float16",
           sensitive="float16", output="float16"),
    Policy("mixed_bfloat16", compute="bfloat16"),
    Policy("tf32", product="tf32"),
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
