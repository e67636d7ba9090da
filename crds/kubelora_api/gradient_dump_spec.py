"""``spec.health.dumpGradients``: which raw gradients a run writes down, and how many of them."""

import re
from typing import Annotated, Final

from pydantic import Field

from kubelora_api.schema import LIST_ATOMIC, ApiModel, Rule
from kubelora_api.types import Pattern, PatternItems

_COMPARISON: Final = r"(absmax|norm|zero_ratio) [<>] [0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?"
CONDITION_PATTERN: Final = f"^(nonfinite|{_COMPARISON}( and {_COMPARISON}){{0,3}})$"


def _matches(condition: str) -> bool:
    return re.fullmatch(CONDITION_PATTERN, condition) is not None


Condition = Annotated[
    str,
    Field(min_length=1, max_length=128),
    Rule(
        cel=f"self.matches(r'{CONDITION_PATTERN}')",
        message="a condition is nonfinite, or comparisons joined by and, such as "
        "'absmax < 1e-4' or 'norm > 10 and zero_ratio < 0.5'; absmax, norm and zero_ratio can be "
        "compared with < and >",
        check=_matches,
    ),
]


class DumpGradients(ApiModel):
    """Writes raw gradients to the folder gradients of the output, as they enter the accumulator:
    each micro-batch's own, before it is added, as safetensors.
    """

    modules: Annotated[list[Pattern], Field(max_length=64), LIST_ATOMIC, PatternItems] = Field(
        default_factory=list,
        description="Regular expressions matched against the end of a module's name, or of a "
        "factor's, such as attn2.to_k or to_q.lora_A. Default: all modules. At most 64.",
    )
    when: Condition = Field(
        "nonfinite",
        description="Which gradients of a micro-batch are written: nonfinite (default: any NaN or "
        "infinite element), or comparisons of absmax, norm and zero_ratio with numbers, such as "
        "absmax < 1e-4 and absmax > 0.",
    )
    budget: Annotated[str, Field(pattern=r"^[0-9]{1,6}(Ki|Mi|Gi)$", max_length=16)] = Field(
        "256Mi",
        description="Most bytes that are written over the whole run, such as 64Mi or 2Gi; with "
        "several GPUs each may write an equal share. Default 256Mi.",
    )
