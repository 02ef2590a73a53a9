"""What prompts need of a tokenizer, and two that have it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tasks.errors import UsageError

CHARS_PER_TOKEN = 3.0
"""Rough size of a token of code, used where the endpoint's tokenizer is unknown; on the safe side."""


class Tokenizer(Protocol):
    """Renders a chat and counts tokens."""

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The text of the whole prompt, up to where the answer begins."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a rendered prompt; empty where they are unknown."""

    def count(self, text: str) -> int:
        """Number of tokens of a rendered prompt."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template."""

    def __init__(self, hugging_face: Any, end_token_id: int) -> None:
        self._hf = hugging_face
        self.end_token_id = end_token_id
        """Id of the token that ends an answer: the one at which engines stop, whatever the tokenizer calls its own."""

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """Reads the tokenizer of a checkpoint folder; UsageError when the checkpoint names no end token."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(str(folder)), stop_token_ids(folder)[0])

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The chat template applied, with the header of the assistant's turn."""
        return str(self._hf.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids; the chat template has already written every special token."""
        return tuple(self._hf.encode(text, add_special_tokens=False))

    def count(self, text: str) -> int:
        """Number of tokens."""
        return len(self.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens and without any clean-up of spaces."""
        return str(self._hf.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class PlainTokenizer:
    """For endpoints that render chats themselves: the messages' text as it is, tokens estimated from characters."""

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The messages' contents, one after the other."""
        return "\n\n".join(message["content"] for message in messages)

    def encode(self, text: str) -> tuple[int, ...]:  # noqa: ARG002
        """Nothing: the ids are the endpoint's affair."""
        return ()

    def count(self, text: str) -> int:
        """Estimated number of tokens, rounded up."""
        return -int(-len(text) // CHARS_PER_TOKEN)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Not possible; endpoints send text."""
        raise NotImplementedError("a plain tokenizer has no token ids to decode")


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end an answer, from the checkpoint's generation or model configuration; UsageError without any."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids: Any = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    raise UsageError(f"the model in {folder} names no end token: add eos_token_id to its generation_config.json.")
