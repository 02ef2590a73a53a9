from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.parse import MAX_SOURCE_CHARS, MAX_TEXT_CHARS, parse_completion, render_completion

CODE = "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    pass"


def _wrapped(code_section: str) -> str:
    return f"## Performance Analysis\nA.\n## Algorithm Design\nD.\n## Code Implementation\n{code_section}"


def test_golden_rendering() -> None:
    assert render_completion("The second fuses.", "Fuse all.", "class ModelNew: ...\n") == (
        "## Performance Analysis\nThe second fuses.\n## Algorithm Design\nFuse all.\n"
        "## Code Implementation\n```python\nclass ModelNew: ...\n```"
    )


def test_golden_reading() -> None:
    parsed = parse_completion(_wrapped(f"Here it is:\n```python\n{CODE}\n```\nDone."))
    assert (parsed.analysis, parsed.design, parsed.source) == ("A.", "D.", CODE)
    assert parsed.error is None
    assert not parsed.truncated


@pytest.mark.parametrize(
    "heading",
    [
        "## Code Implementation", "# code implementation", "### Code Implementation:", "## **Code Implementation**",
        "**Code Implementation**", "**Code Implementation:**", "## 3. Code Implementation",
        "## Code  Implementation ##", "## Code Implementation\r",
    ],
)  # fmt: skip
def test_headings_are_read_generously(heading: str) -> None:
    """A block before the heading is of another section, so it is chosen only if the heading was not seen."""
    text = f"## Algorithm Design\n```python\nclass ModelNew: decoy = 1\n```\n{heading}\n```python\n{CODE}\n```\n"
    text += "## Algorithm Design\n```python\nclass ModelNew: decoy = 2\n```"
    assert parse_completion(text).source == CODE


def test_the_last_python_block_with_the_model_counts() -> None:
    blocks = f"```python\nclass ModelNew: first = 1\n```\n```python\n{CODE}\n```\n"
    blocks += "```python\nprint('usage')\n```\n```cpp\nint x;\n```"
    assert parse_completion(_wrapped(blocks)).source == CODE


def test_the_last_python_block_counts_when_none_has_the_model() -> None:
    assert parse_completion(_wrapped("```py\na = 1\n```\n```python\nb = 2\n```")).source == "b = 2"


def test_a_block_without_language_counts_only_where_no_python_block_is() -> None:
    assert parse_completion(_wrapped(f"```\n{CODE}\n```")).source == CODE
    assert parse_completion(_wrapped(f"```python\n{CODE}\n```\n```\nclass ModelNew: x = 1\n```")).source == CODE


def test_other_languages_are_no_candidates() -> None:
    assert parse_completion(_wrapped("```cuda\n__global__ void k();\n```")).error == "no_code"


def test_headings_and_shorter_fences_inside_code_are_code() -> None:
    source = f'{CODE}\n    """\n## Algorithm Design\n```\nint x;\n```\n"""'
    parsed = parse_completion(render_completion("A.", "D.", source))
    assert parsed.source == source
    assert parsed.design == "D."


def test_an_opening_fence_inside_a_block_is_code() -> None:
    source = f"{CODE}\n# ```cuda\n```cuda\n# x"
    assert parse_completion(_wrapped(f"```python\n{source}\n```")).source == source


def test_tilde_fences() -> None:
    assert parse_completion(_wrapped(f"~~~python\n{CODE}\n~~~")).source == CODE


def test_without_headings_the_whole_text_is_searched() -> None:
    parsed = parse_completion(f"Sure!\n```python\n{CODE}\n```")
    assert (parsed.source, parsed.analysis) == (CODE, "")


def test_bare_code_under_its_heading() -> None:
    assert parse_completion(_wrapped(CODE)).source == CODE


def test_bare_prose_is_no_code() -> None:
    parsed = parse_completion(_wrapped("I would write class ModelNew here."))
    assert (parsed.source, parsed.error) == (None, "no_code")


def test_an_open_block_counts_unless_cut() -> None:
    text = _wrapped(f"```python\n{CODE}")
    assert parse_completion(text).source == CODE
    cut = parse_completion(text, cut=True)
    assert (cut.source, cut.error, cut.truncated) == (None, "truncated", True)


def test_a_complete_block_counts_even_when_cut_afterwards() -> None:
    parsed = parse_completion(_wrapped(f"```python\n{CODE}\n```\nThis kernel is fas"), cut=True)
    assert (parsed.source, parsed.error, parsed.truncated) == (CODE, None, True)


def test_cut_before_any_code() -> None:
    assert parse_completion("## Performance Analysis\nThe", cut=True).error == "truncated"


def test_empty_block() -> None:
    assert parse_completion(_wrapped("```python\n\n```")).error == "no_code"


def test_huge_texts_are_refused() -> None:
    assert parse_completion("x" * (MAX_TEXT_CHARS + 1)).error == "too_large"
    huge = "class ModelNew: ...\n" + "#" * MAX_SOURCE_CHARS
    assert parse_completion(_wrapped(f"```python\n{huge}\n```")).error == "too_large"


def test_many_fences_and_long_lines_take_linear_time() -> None:
    """Both would take minutes if any pattern backtracked over the text."""
    assert parse_completion("```\n" * 200_000).source is None
    assert parse_completion("## " + "a " * 300_000).source is None
    assert parse_completion("`" * 900_000).source is None


def test_lone_surrogates_are_not_text() -> None:
    assert parse_completion(_wrapped("```python\nclass ModelNew: x = '\ud800'\n```")).error == "not_text"


@given(st.text(max_size=300), st.booleans())
def test_any_text_is_read(text: str, cut: bool) -> None:
    parsed = parse_completion(text, cut=cut)
    assert (parsed.source is None) == (parsed.error is not None)


PROSE = st.text(
    st.characters(codec="utf-8", exclude_characters="#*_`~\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=80
)
LINES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30), min_size=1, max_size=12)
HOSTILE = st.lists(
    st.sampled_from(["```", "````python", "~~~", "## Code Implementation", "x = 1", "", "    ```"]), min_size=1
)


@given(PROSE, PROSE, LINES | HOSTILE)
def test_reading_inverts_rendering(analysis: str, design: str, lines: list[str]) -> None:
    source = "\n".join(lines).strip("\n")
    parsed = parse_completion(render_completion(analysis, design, source))
    assert (parsed.analysis, parsed.design) == (analysis.strip(), design.strip())
    assert parsed.source == (source if source.strip() else None)


@pytest.mark.parametrize("part", ["## Code Implementation", "```python", "fine\n**Algorithm Design**"])
def test_rendering_refuses_prose_that_would_not_come_back(part: str) -> None:
    with pytest.raises(ValueError, match="no heading"):
        render_completion(part, "D.", CODE)
    with pytest.raises(ValueError, match="no heading"):
        render_completion("A.", part, CODE)
