"""Policies: which number format each part of a network has."""
from __future__ import annotations

from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Any, Optional, Sequence, Union

from .checks import whole_number
from .cpu.tensor_core.gpus import check_split, of_gpu
from .formats import BFLOAT16, FLOAT16, FLOAT32, Format, get_format

FormatOrName = Union[str, Format]
SCALINGS = ("delayed", "current")
GEMMS = ("forward", "data_gradient", "weight_gradient")


@dataclass(frozen=True)
class Policy:
    """The number formats of a network, one for each role: each a `gluon_amp.Format` or a name.

    Attributes:
        name: the name in errors and logs.
        parameter: the format of stored parameters: float32, float16 or bfloat16.
        product: the format of the inputs of convolutions, dense layers and other products. If it
            and `gradient` are float16 or bfloat16, products return arrays of that type.
        activation: the format of activations, the results of operators.
        gradient: the format of gradients. If `product` differs from `activation`, or both are
            float32, only the format of gradients that products read; all others have `activation`.
            Default: `product`.
        norm: the format in which norms compute: float32 or `activation`.
        sensitive: the format in which softmax, losses, exponentials and large sums compute:
            float32 or `activation`.
        output: the format of the network's result: float32, float16 or bfloat16.
        batched: the format of the inputs of batched products (`batch_dot`, `np.matmul`): float32
            or `product`. The default for float16 is float32, because MXNet accumulates these in
            float16 on a GPU.
        compute: one format for both `product` and `activation`.
        accumulate: a GPU, such as "V100": float16 products on a CPU sum as its Tensor Cores do
            (`gluon_amp.tensor_core_dot`), forward and backward. None sums in float32.
        split: the number of terms that `accumulate` sums in one chain; None: all.
        scaling: the scale of tensors that products read in a narrow format, a power of two: from
            the tensor itself ("current"), from the maximum of the last `history` tensors at the
            same place ("delayed"), or None.
        history: the number of past tensors of "delayed".
        margin: powers of two of headroom above the maximum.
        high_precision: the products of a layer in high precision: "forward", "data_gradient",
            "weight_gradient", or a sequence of these. Such a product reads activations without
            rounding and accumulates in float32. Valid if products round their inputs, or with
            `accumulate`.
    """
    name: str
    parameter: Any = "float32"
    compute: InitVar[Optional[FormatOrName]] = None
    norm: Any = "float32"
    sensitive: Any = "float32"
    output: Any = "float32"
    product: Any = None
    activation: Any = None
    gradient: Any = None
    accumulate: Optional[str] = None
    split: Optional[int] = None
    scaling: Optional[str] = None
    history: int = 16
    margin: int = 0
    batched: Any = None
    high_precision: Any = ()

    def __post_init__(self, compute: Optional[FormatOrName]) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a policy's name must be a string. Received: {self.name!r}")
        if compute is not None:
            self._take_compute(compute)
        activation = self._set("activation", FLOAT32)
        product = self._set("product", activation)
        gradient = self._set("gradient", product)
        name = activation.name
        if self.gradient_everywhere and activation.is_array_type and not activation.holds(gradient):
            raise ValueError(f"policy {self.name}: gradients of {name} arrays are {name} "
                             f"numbers. Valid: a format whose numbers {name} has, such as "
                             f"float8_e5m2. Received: gradient={gradient.name}, product={name}, "
                             f"activation={name}")
        for role in ("parameter", "output"):
            self._one_of(role, (FLOAT32, FLOAT16, BFLOAT16))
        for role in ("norm", "sensitive"):
            self._one_of(role, (FLOAT32, activation))
        if self.batched is None:
            float16 = self.one_format and product == FLOAT16
            object.__setattr__(self, "batched", FLOAT32 if float16 else product)
        self._one_of("batched", (FLOAT32, product))
        check_split(self.split)
        if self.split is not None and self.accumulate is None:
            raise ValueError(f"policy {self.name}: split is for accumulate=. Received: "
                             f"split={self.split}, accumulate=None")
        self._check_scaling()
        if self.accumulate is not None:
            of_gpu(self.accumulate)
            if not (product == self.gradient == FLOAT16):
                raise ValueError(f"policy {self.name}: accumulate={self.accumulate!r} is for "
                                 f"float16 products. Received: product={product.name}, "
                                 f"gradient={self.gradient.name}")
        self._check_high_precision()

    def _take_compute(self, compute: FormatOrName) -> None:
        """Sets `product` and `activation` to `compute`."""
        given = [f"{role}={getattr(self, role)!r}" for role in ("product", "activation")
                 if getattr(self, role) is not None]
        if given:
            raise ValueError(f"policy {self.name}: compute sets product and activation. Valid: "
                             f"compute, or these two. Received: compute={compute!r}, "
                             f"{', '.join(given)}")
        for role in ("product", "activation"):
            object.__setattr__(self, role, get_format(compute, f"policy {self.name}: compute"))

    def _check_scaling(self) -> None:
        if self.scaling is not None and self.scaling not in SCALINGS:
            raise ValueError(f"policy {self.name}: unknown scaling. Valid: None, "
                             f"{', '.join(SCALINGS)}. Received: {self.scaling!r}")
        for what, least, usual, of in (("history", 1, 16, ("delayed",)),
                                       ("margin", 0, 0, SCALINGS)):
            number = whole_number(getattr(self, what), f"policy {self.name}: {what}", least)
            if number != usual and self.scaling not in of:
                raise ValueError(f"policy {self.name}: {what} is for scaling={' or '.join(of)}. "
                                 f"Received: {what}={number}, scaling={self.scaling}")
            object.__setattr__(self, what, number)
        if self.scaling is None:
            return
        if self.product.is_array_type or self.product == self.activation:
            raise ValueError(f"policy {self.name}: scaling is for products whose format differs "
                             "from activation, such as product='float8_e4m3', "
                             "activation='bfloat16'. Received: "
                             f"product={self.product.name}, activation={self.activation.name}")

    def _check_high_precision(self) -> None:
        given = self.high_precision
        names = (given,) if isinstance(given, str) else given
        if not isinstance(names, (tuple, list, set, frozenset)) \
                or not all(each in GEMMS for each in names):
            raise ValueError(f"policy {self.name}: unknown high_precision. Valid: "
                             f"{', '.join(GEMMS)}, or a sequence of these. Received: {given!r}")
        object.__setattr__(self, "high_precision", tuple(each for each in GEMMS if each in names))
        if names and not (self.products_round or self.accumulate):
            raise ValueError(f"policy {self.name}: high_precision is for products that round their "
                             "inputs, such as product='float8_e4m3', activation='bfloat16', or for "
                             f"accumulate=. Other products read activations unrounded and sum in "
                             f"float32. Received: product={self.product.name}, "
                             f"activation={self.activation.name}, gradient={self.gradient.name}")

    def _set(self, role: str, default: Any = None) -> Format:
        given = getattr(self, role)
        made = get_format(default if given is None else given, f"policy {self.name}: {role}")
        object.__setattr__(self, role, made)
        return made

    def _one_of(self, role: str, valid: Sequence[Format]) -> None:
        if self._set(role) not in valid:
            names = " or ".join(", ".join(dict.fromkeys(v.name for v in valid)).rsplit(", ", 1))
            raise ValueError(f"policy {self.name}: {role} must be {names}. "
                             f"Received: {getattr(self, role).name}")

    @property
    def is_float32(self) -> bool:
        """Whether all its formats are float32."""
        return all(role == FLOAT32 for role in (
            self.parameter, self.product, self.activation, self.gradient, self.norm, self.sensitive,
            self.output))

    @cached_property
    def one_format(self) -> bool:
        """Whether `product`, `activation` and `gradient` are the same format."""
        return self.product == self.activation == self.gradient

    @cached_property
    def gradient_everywhere(self) -> bool:
        """Whether all gradients have the format `gradient`, not only those that products read."""
        return self.product == self.activation != FLOAT32

    @cached_property
    def products_round(self) -> bool:
        """Whether products round their inputs, which are arrays of `activation`.

        Otherwise the inputs have the format already, by casts or because it is `activation`.
        """
        return not self.gradient_everywhere and (
            self.gradient != self.product or not self.product.is_array_type)

    @property
    def in_order(self) -> bool:
        """Whether results depend on the order in which operators run."""
        return self.scaling == "delayed" or any(
            format_.rounding == "stochastic"
            for format_ in (self.product, self.activation, self.gradient))

    @property
    def cpu_only(self) -> bool:
        """Whether a GPU lacks arrays of a format, or accumulates differently."""
        formats = (self.parameter, self.product, self.activation, self.output)
        return self.is_emulated or BFLOAT16 in formats

    @property
    def is_emulated(self) -> bool:
        """Whether a CPU emulates a format on float32 arrays, or a GPU's accumulation."""
        return self.accumulate is not None or self.gradient != self.product \
            or not (self.product.is_array_type and self.activation.is_array_type)


Policy.__init__.__doc__ = "See the class for the arguments."
POLICIES = {policy.name: policy for policy in (
    Policy("float32"),
    Policy("float16", parameter="float16", compute="float16"),
    Policy("mixed_float16", compute="float16"),
    Policy("pure_float16", parameter="float16", compute="float16", norm="float16",
           sensitive="float16", output="float16", batched="float16"),
    Policy("bfloat16", parameter="bfloat16", compute="bfloat16"),
    Policy("mixed_bfloat16", compute="bfloat16"),
    Policy("tf32", product="tf32"),
    Policy("mixed_float8", product="float8_e4m3", activation="bfloat16", gradient="float8_e5m2",
           scaling="delayed"),
)}
IN_SYMBOLS = [name for name, policy in POLICIES.items()
              if not (policy.is_emulated or policy.is_float32)]
APEX = {"O0": "float32", "O1": "mixed_float16", "O2": "float16", "O3": "pure_float16"}
NAMES = (*POLICIES, *APEX)


def get_policy(policy: Union[str, Policy]) -> Policy:
    """Returns the policy of a name; a `Policy` unchanged."""
    if isinstance(policy, Policy):
        return policy
    name = APEX.get(policy, policy) if isinstance(policy, str) else None
    if name not in POLICIES:
        raise ValueError(f"unknown policy. Valid: {', '.join(NAMES)}, or a "
                         f"gluon_amp.Policy. Received: {policy!r}")
    return POLICIES[name]
