"""``spec.health.dumpGradients``: which raw gradients a run saves, and how many."""

import re
from typing import Annotated, Final

from pydantic import Field

from kubelora_api.decides import Decides
from kubelora_api.schema import LIST_ATOMIC, ApiModel, Rule
from kubelora_api.types import Pattern, PatternItems

_COMPARISON: Final = r"(absmax|norm|zero_ratio) [<>] [0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?"
CONDITION_PATTERN: Final = f"^(nonfinite|{_COMPARISON}( and {_COMPARISON}){{0,3}})$"


def _matches(condition: str) -> bool:
    return re.fullmatch(CONDITION_PATTERN, condition) is not None


DumpCondition = Annotated[
    str,
    Field(min_length=1, max_length=128),
    Rule(
        cel=f"self.matches(r'{CONDITION_PATTERN}')",
        message="must be nonfinite, or comparisons joined by and, such as 'absmax < 1e-4' or "
        "'norm > 10 and zero_ratio < 0.5'; absmax, norm and zero_ratio can be compared with < "
        "and >",
        check=_matches,
    ),
]


class DumpGradients(ApiModel):
    """Raw gradients to save as safetensors in the directory gradients of the output: those of each
    micro-batch, before they are accumulated.
    """

    modules: Annotated[
        list[Pattern],
        Field(max_length=64),
        LIST_ATOMIC,
        PatternItems,
        Decides("nothing", live=True),
    ] = Field(
        default_factory=list,
        description="Regular expressions matched against the end of a module's or factor's name, "
        "such as attn2.to_k or to_q.lora_A. At most 64. Default: all modules.",
    )
    when: Annotated[DumpCondition, Decides("nothing", live=True)] = Field(
        "nonfinite",
        description="Condition for saving a gradient of a micro-batch: nonfinite (default: any NaN "
        "or infinite element), or comparisons of absmax, norm and zero_ratio with numbers, such as "
        "absmax < 1e-4 and absmax > 0.",
    )
    budget: Annotated[
        str, Field(pattern=r"^[0-9]{1,6}(Ki|Mi|Gi)$", max_length=16), Decides("nothing", live=True)
    ] = Field(
        "256Mi",
        description="Maximum number of bytes to save over the run, such as 64Mi or 2Gi; with "
        "several GPUs each may save an equal share. Default 256Mi.",
    )
