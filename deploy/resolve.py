"""From TOML and `--section.key value` to a validated tree, and back to TOML.

Invariants: an unknown key is an error that names the nearest known one; an error names file or flag, key and what is
allowed; nothing here knows any section by name.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tasks.config import Section
from tasks.errors import UsageError

Tree = dict[str, Any]
S = TypeVar("S", bound=Section)
BASE_KEY = "base"


class ConfigError(UsageError):
    """The configuration cannot be used as written."""


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    folder = resources.files("deploy.presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_tree(source: str) -> Tree:
    """The tree of a preset by name or of a TOML file by path; `base = "<preset>"` in a file is filled in beneath it."""
    if source in preset_names():
        return _parse(resources.files("deploy.presets").joinpath(f"{source}.toml").read_text(), source)
    path = Path(source)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(preset_names())
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"Cannot read configuration {source} ({reason}); the presets are {known}.") from error
    tree = _parse(text, source)
    base = tree.pop(BASE_KEY, None)
    return tree if base is None else merge(read_tree(str(base)), tree)


def _parse(text: str, source: str) -> Tree:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}.") from error


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Tree:
    """`upper` laid over `lower`, table by table; lists and values are replaced whole."""
    merged = dict(lower)
    for key, value in upper.items():
        beneath = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(beneath, Mapping)
        merged[key] = merge(beneath, value) if both else value  # type: ignore[arg-type]
    return merged


def parse_overrides(arguments: Sequence[str], model: type[Section]) -> Tree:
    """`--section.key value` and `--section.key=value` pairs as a tree; raises ConfigError on anything else."""
    tree: Tree = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or "." not in word:
            raise ConfigError(f"Unexpected argument {word}: settings are given as --section.key value.")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not words:
                raise ConfigError(f"--{name} needs a value.")
            text = words.pop(0)
        keys = name.replace("-", "_").split(".") if _field(model, name.split(".")) is None else name.split(".")
        branch = tree
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
        branch[keys[-1]] = _value(text, _field(model, keys))
    return tree


def _value(text: str, field: FieldInfo | None) -> Any:
    """The text as the field takes it: as a string if that validates, else as TOML, else as a comma-separated list."""
    try:
        as_toml = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        as_toml = text
    if field is None:
        return as_toml
    adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
    for candidate in (text, as_toml, [part.strip() for part in text.split(",") if part.strip()]):
        try:
            adapter.validate_python(candidate)
        except ValidationError:
            continue
        return candidate
    return as_toml


def validate(model: type[S], tree: Tree, source: str) -> S:
    """The tree as a frozen model; raises ConfigError with every error in one text."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        texts = [_explain(model, item) for item in error.errors()]
        raise ConfigError(f"Configuration {source}: {'; '.join(texts)}.") from error


def _explain(model: type[Section], error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    name = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"unknown key {name}{_did_you_mean(name, dict(walk(model)))}"
    if error["type"] == "missing":
        return f"{name} is required"
    message = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    if not name:
        return message
    return f"{name} = {error['input']!r}: {message[:1].lower()}{message[1:]}"


def _did_you_mean(name: str, known: Mapping[str, FieldInfo]) -> str:
    """The nearest key: by its whole name, or, for a key in the wrong section, by its last word."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:
        by_last = {key.rsplit(".", 1)[-1]: key for key in known}
        close = [by_last[word] for word in difflib.get_close_matches(name.rsplit(".", 1)[-1], by_last, n=1)]
    if close:
        return f" (did you mean {close[0]}?)"
    sections = sorted({key.split(".")[0] for key in known if "." in key})
    return "" if "." in name else f" (the sections are {', '.join(sections)})"


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in an annotation, also inside an optional; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            if (found := section_of(part)) is not None:
                return found
    return None


def walk(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every plain key of a tree with its field, by dotted name."""
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        inner = section_of(field.annotation)
        if inner is None:
            yield key, field
        else:
            yield from walk(inner, f"{key}.")


def _field(model: type[Section], keys: Sequence[str]) -> FieldInfo | None:
    return dict(walk(model)).get(".".join(keys))


def to_toml(tree: Mapping[str, Any]) -> str:
    """TOML text of a tree of JSON values; keys without a value (None) are left out."""
    lines: list[str] = []
    _write_table(tree, (), lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping) and value is not None}
    if path and (plain or not table):
        lines += ["", f"[{'.'.join(_key(part) for part in path)}]"]
    lines += [f"{_key(key)} = {_scalar(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            _write_table(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) else _text(key)


def _scalar(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_scalar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    # TOML has no surrogate pairs, and refuses a bare DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
