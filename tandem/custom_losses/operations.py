"""The operations of a custom loss, by the names under which torch.fx records them.

Everything else is refused: operations that change a tensor in place, draw random numbers, leave
torch (`item`, `tolist`, `numpy`), run modules or code, or make uninitialised tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ELEMENTWISE = """
abs absolute acos acosh asin asinh atan atan2 atanh ceil clamp clamp_max clamp_min clip copysign
cos cosh digamma div divide eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax
fmin fmod frac ge greater greater_equal gt heaviside hypot isfinite isinf isnan le less
less_equal lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not
logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg
negative not_equal positive pow reciprocal relu remainder round rsqrt sgn sigmoid sign sin sinc
sinh sqrt square sub subtract add addcdiv addcmul tan tanh true_divide trunc where xlogy
bitwise_and bitwise_not bitwise_or bitwise_xor
"""

_REDUCING = """
all amax amin any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum diff dist
kthvalue log_softmax logcumsumexp logsumexp max mean median min nanmean nansum norm prod quantile
softmax sort std sum topk var
"""

_SHAPING = """
broadcast_to chunk clone detach diag diagonal dot flatten flip gather index_add index_fill
index_select inner masked_select matmul mm movedim mv narrow numel outer permute ravel
repeat_interleave reshape roll scatter scatter_add select split squeeze swapaxes t take
take_along_dim tile transpose tril triu unbind unsqueeze bmm is_floating_point
"""


def _words(*texts: str) -> frozenset[str]:
    return frozenset(word for text in texts for word in text.split())


METHODS = _words(
    _ELEMENTWISE,
    _REDUCING,
    _SHAPING,
    """
bfloat16 bool contiguous cpu dim double expand expand_as float half int long ndimension nelement
new_full new_ones new_zeros repeat reshape_as size to type type_as unflatten view view_as
""",
)
"""Methods of a tensor. `to`, `type` and `cpu` never leave the device of the loss."""

_TORCH = """
arange bucketize cat concat cosine_similarity einsum eye full full_like hstack linspace ones
ones_like rsub searchsorted stack std_mean trapz var_mean vstack zeros zeros_like
"""
_FUNCTIONAL = """
binary_cross_entropy binary_cross_entropy_with_logits celu cosine_similarity cross_entropy elu
gaussian_nll_loss gelu glu hardshrink hardsigmoid hardswish hardtanh huber_loss kl_div l1_loss
leaky_relu log_softmax logsigmoid margin_ranking_loss mish mse_loss nll_loss normalize one_hot pad
poisson_nll_loss relu relu6 selu sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin
softplus softshrink softsign tanh tanhshrink threshold
"""
_SPECIAL = """
entr erf erfc exp2 expit expm1 gammaln log1p log_ndtr log_softmax logit logsumexp ndtr round sinc
softmax xlog1py xlogy
"""
_OPERATOR = """
abs add and_ eq floordiv ge getitem gt inv invert le lt matmul mod mul ne neg not_ or_ pos pow sub
truediv xor
"""
_MATH = """
acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs
floor fmod hypot isfinite isinf isnan lgamma log log10 log1p log2 pow radians sin sinh sqrt tan
tanh trunc
"""

MODULES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "torch": _words(_ELEMENTWISE, _REDUCING, _SHAPING, _TORCH),
        "torch.nn.functional": _words(_FUNCTIONAL),
        "torch.special": _words(_SPECIAL),
        "torch.linalg": _words("norm vector_norm"),
        "operator": _words(_OPERATOR),
        "math": _words(_MATH),
    }
)
"""Functions by module. Those of `math` take only numbers, which come from shapes."""

FUNCTIONS = frozenset(
    {"getattr", *(f"{module}.{name}" for module, names in MODULES.items() for name in names)}
)

ATTRIBUTES = _words("T device dtype indices mT ndim shape values")
"""Attributes that `getattr` may read, from a tensor or a pair such as `torch.max(x, dim=0)`."""

DTYPES = _words("float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool")

FORBIDDEN_KEYWORDS = _words("out generator requires_grad pin_memory names")

PUBLIC_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "builtins.getattr": "getattr",
        "torch.functional.norm": "torch.norm",
        "torch.functional.split": "torch.split",
        "torch.functional.einsum": "torch.einsum",
        "torch._C._nn.log_sigmoid": "torch.nn.functional.logsigmoid",
        "torch.hardshrink": "torch.nn.functional.hardshrink",
        "torch.nn.functional._threshold": "torch.nn.functional.threshold",
        **{
            f"torch._C._nn.{name}": f"torch.nn.functional.{name}"
            for name in ("softplus", "gelu", "one_hot", "softshrink")
        },
        **{
            f"torch._C._{module}.{module}_{name}": f"torch.{module}.{name}"
            for module in ("special", "linalg")
            for name in sorted(MODULES[f"torch.{module}"])
        },
    }
)
"""The public names of functions that torch.fx records under private ones."""
