"""Reads a completion: analysis, design and code; the inverse of `render_completion`.

Pure, linear in the text, total: any text gives a ParsedCompletion, and `source` is None exactly when `error` is set.
Headings inside code fences are code. Headings are read generously (any level, bold, numbered, a trailing colon), since
what counts is the kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ParseError = Literal["no_code", "truncated", "too_large", "not_text"]
Section = Literal["analysis", "design", "code"]

MAX_TEXT_CHARS = 1_000_000
"""Longer completions are not read."""
MAX_SOURCE_CHARS = 200_000
"""Longer sources are not taken for a candidate."""

HEADINGS: dict[Section, str] = {
    "analysis": "Performance Analysis",
    "design": "Algorithm Design",
    "code": "Code Implementation",
}
_PYTHON_WORDS = ("python", "py", "python3")
_HEADING = re.compile(
    r"^ {0,3}(?:#{1,6} *(?:\*\*|__)?|\*\*|__)(?:\d{1,2}[.)] *)?(?P<title>[a-z][a-z ]{2,40}?)"
    r" *:?(?:\*\*|__)? *:?#* *$",
    re.IGNORECASE,
)
_FENCE = re.compile(r"^ {0,3}(?P<ticks>`{3,}|~{3,}) *(?P<word>[^\s`{]*)[^`]*$")
_MODEL_CLASS = re.compile(r"^class +ModelNew\b", re.MULTILINE)


@dataclass(frozen=True)
class ParsedCompletion:
    """What a completion says. `source` is the candidate's text, None when no code could be read."""

    analysis: str
    design: str
    source: str | None
    error: ParseError | None = None
    truncated: bool = False
    """True when the text ended at the token limit, whether or not the code was complete."""


@dataclass(frozen=True)
class _Block:
    section: Section | None
    word: str
    text: str
    closed: bool


def render_completion(analysis: str, design: str, source: str) -> str:
    """The text that `parse_completion` reads back; supervised targets are built with it.

    Raises ValueError for an analysis or design that would itself read as a heading or a fence.
    """
    for part in (analysis, design):
        if any(_HEADING.match(line) or _FENCE.match(line) for line in part.splitlines()):
            raise ValueError("analysis and design must hold no heading and no code fence")
    longest = max((len(ticks) for ticks in re.findall(r"^ {0,3}(`{3,})", source, re.MULTILINE)), default=2)
    fence = "`" * (longest + 1)
    return (
        f"## {HEADINGS['analysis']}\n{analysis.strip()}\n"
        f"## {HEADINGS['design']}\n{design.strip()}\n"
        f"## {HEADINGS['code']}\n{fence}python\n{_trim(source)}\n{fence}"
    )


def parse_completion(text: str, *, cut: bool = False) -> ParsedCompletion:
    """Reads a completion; `cut` says that it ended at the token limit.

    The candidate is the last Python block of the code section that defines `ModelNew`, else its last Python block,
    else its last block without a language; without a code section the whole text is searched. A block left open
    counts when the policy ended there by itself, and is `truncated` when it was cut.
    """
    if len(text) > MAX_TEXT_CHARS:
        return ParsedCompletion("", "", None, "too_large", cut)
    try:
        text.encode()
    except UnicodeEncodeError:
        return ParsedCompletion("", "", None, "not_text", cut)
    prose, blocks = _read(text)
    analysis, design = prose["analysis"], prose["design"]
    block = _choose(blocks)
    if block is None:
        source = _bare_code(prose["code"])
        if source is None:
            return ParsedCompletion(analysis, design, None, "truncated" if cut else "no_code", cut)
        block = _Block("code", "", source, closed=False)
    if cut and not block.closed:
        return ParsedCompletion(analysis, design, None, "truncated", cut)
    if len(block.text) > MAX_SOURCE_CHARS:
        return ParsedCompletion(analysis, design, None, "too_large", cut)
    if not block.text.strip():
        return ParsedCompletion(analysis, design, None, "no_code", cut)
    return ParsedCompletion(analysis, design, block.text, None, cut)


def _read(text: str) -> tuple[dict[Section, str], list[_Block]]:
    """Prose of each section and all fenced blocks, in order. A repeated heading starts its section anew."""
    prose: dict[Section, list[str]] = {"analysis": [], "design": [], "code": []}
    blocks: list[_Block] = []
    section: Section | None = None
    fence = word = ""
    inside: list[str] = []
    for line in text.split("\n"):
        line = line.removesuffix("\r")
        if fence:
            if _closes(line, fence):
                blocks.append(_Block(section, word, _trim("\n".join(inside)), closed=True))
                fence = ""
            else:
                inside.append(line)
        elif (title := _section_of(line)) is not None:
            section = title
            prose[section] = []
        elif (opening := _FENCE.match(line)) is not None:
            fence, word, inside = opening["ticks"], opening["word"].lower(), []
        elif section is not None:
            prose[section].append(line)
    if fence:
        blocks.append(_Block(section, word, _trim("\n".join(inside)), closed=False))
    return {name: "\n".join(lines).strip() for name, lines in prose.items()}, blocks


def _section_of(line: str) -> Section | None:
    match = _HEADING.match(line) if len(line) < 80 else None
    if match is None:
        return None
    title = " ".join(match["title"].split()).lower()
    return next((name for name, heading in HEADINGS.items() if title == heading.lower()), None)


def _closes(line: str, fence: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(fence) and set(stripped) == {fence[0]} and not line.startswith("    ")


def _choose(blocks: list[_Block]) -> _Block | None:
    in_section = [block for block in blocks if block.section == "code"] or blocks
    python = [block for block in in_section if block.word in _PYTHON_WORDS]
    readable = python or [block for block in in_section if block.word == ""]
    with_model = [block for block in readable if _MODEL_CLASS.search(block.text)]
    chosen = with_model or readable
    return chosen[-1] if chosen else None


def _bare_code(prose: str) -> str | None:
    """Code written under its heading without a fence."""
    return prose if _MODEL_CLASS.search(prose) else None


def _trim(source: str) -> str:
    return source.strip("\n")
