"""Renames what a candidate itself defines and lays it out anew: another text of the same program.

Names are numbered in the order in which they are met. What other code may know is kept: `ModelNew` and the functions of
the convention, names of the state that is loaded, names that stand in a string, keywords of calls, members that a base
class from elsewhere has, imports.
"""

from __future__ import annotations

import ast
import builtins
import threading
from collections.abc import Iterable
from typing import Any

import torch

_CONVENTION = frozenset(("Model", "ModelNew", "forward", "backward", "get_inputs", "get_init_inputs"))
_BASES = (torch.nn.Module, torch.Tensor, torch.autograd.Function, threading.Thread, BaseException, dict)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def renamed(source: str, kept: Iterable[str] = ()) -> str:
    """The source with every name of its own replaced; `kept` are names of the state, such as `fc` and `weight`."""
    tree = ast.parse(source)
    fixed = {*_CONVENTION, *kept, *vars(builtins), *_words(tree)}
    members = _members(tree) - fixed
    names = _names(tree) - fixed - members
    return ast.unparse(_Renamer(names, members).visit(tree)) + "\n"


def state_names(task: str) -> set[str]:
    """The words in the names of a reference's state, which a candidate shares with it; runs the task's source."""
    module: dict[str, Any] = {}
    exec(task, module)
    state = module["Model"](*module["get_init_inputs"]()).state_dict()
    return {word for name in state for word in name.split(".")}


def _words(tree: ast.AST) -> set[str]:
    """Names in strings, keywords of calls, imported names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
    return found


def _names(tree: ast.Module) -> set[str]:
    """Functions, classes, arguments and variables."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ExceptHandler | _Function) and node.name:
            found.add(node.name)
    return {name for name in found - _class_level(tree) if not _special(name)}


def _class_level(tree: ast.Module) -> set[str]:
    """What class bodies bind: members, not variables."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for statement in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(statement, _Function | ast.ClassDef):
                found.add(statement.name)
            else:
                found |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found


def _members(tree: ast.Module) -> set[str]:
    """Methods and attributes of `self` that nothing else reaches and no base class has."""
    own: set[str] = set()
    elsewhere: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not of_self:
                elsewhere.add(node.attr)
            elif isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    own |= {
        statement.name
        for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
        for statement in node.body if isinstance(statement, ast.FunctionDef)
    }  # fmt: skip
    return {name for name in own - elsewhere if not _special(name) and not any(hasattr(base, name) for base in _BASES)}


def _special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Renamer(ast.NodeTransformer):
    """Numbers names and members."""

    def __init__(self, names: set[str], members: set[str]) -> None:
        self._names = names
        self._members = members
        self._numbers: dict[str, str] = {}
        self._in_class = False

    def _new(self, name: str) -> str:
        return self._numbers.setdefault(name, f"q{len(self._numbers)}_")

    def _name(self, name: str) -> str:
        return self._new(name) if name in self._names else name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._name(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self._name(node.arg)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        if of_self and node.attr in self._members:
            node.attr = self._new(f"self.{node.attr}")
        return self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = self._name(node.name) if node.name else None
        return self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        return ast.Global([self._name(name) for name in node.names])

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return ast.Nonlocal([self._name(name) for name in node.names])

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self._name(node.name)
        return self._scoped(node, in_class=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self._in_class and node.name in self._members:
            node.name = self._new(f"self.{node.name}")
        else:
            node.name = self._name(node.name)
        return self._scoped(node, in_class=False)

    def _scoped(self, node: ast.AST, *, in_class: bool) -> ast.AST:
        before, self._in_class = self._in_class, in_class
        try:
            return self.generic_visit(node)
        finally:
            self._in_class = before
