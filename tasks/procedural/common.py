"""Texts that the families share: random inputs, and the template slots of a chain."""

from __future__ import annotations

from tasks.procedural.pointwise import Chain


def randn(*shape: int) -> str:
    """Expression of a standard normal fp32 tensor."""
    return f"torch.randn({', '.join(str(n) for n in shape)})"


def chain_slots(
    chain: Chain, *, arguments: str = "x", blocks: str = "x.split(${ROWS})", names: str = "a"
) -> dict[str, str]:
    """Slots of templates whose task ends in `chain`.

    `arguments` are those of `forward` without `y`; `blocks` and `names` what a blocked kernel walks over beside `y`
    and the output. `b` is always the output's block and `c` that of `y`.
    """
    second = chain.second
    return {
        "arguments": f"{arguments}, y" if second else arguments,
        "blocks": blocks + (", y.split(${ROWS})" if second else "") + ", out.split(${ROWS})",
        "names": names + (", c" if second else "") + ", b",
        "epilogue": chain.inplace(),
        "epilogue_c": chain.inplace("c"),
        "triton": "\n".join(chain.triton()),
        "triton_parameters": "y_ptr, " if second else "",
        "triton_arguments": "y, " if second else "",
        "triton_load": "y = tl.load(y_ptr + i, mask=m)" if second else "",
        "c_chain": "\n".join(chain.c()),
        "c_parameters": "const float *y, " if second else "",
        "c_arguments": "y, " if second else "",
    }
