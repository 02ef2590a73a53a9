"""One normal form of Python source, so that comments, layout and doc strings do not make a new program."""

from __future__ import annotations

import ast


def normalised_source(source: str) -> str:
    """The source without comments, doc strings and layout.

    Names are kept: a renamed program is a different text. Source that does not parse is returned with its white
    space collapsed, so that the function is total and every text has a normal form.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return " ".join(source.split())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _drop_docstring(node)
    try:
        return ast.unparse(tree)
    except RecursionError:
        return " ".join(source.split())


def _drop_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    body = node.body
    if not body or not isinstance(body[0], ast.Expr):
        return
    value = body[0].value
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        node.body = body[1:] or [ast.Pass()]
