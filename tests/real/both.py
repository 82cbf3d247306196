"""Which tests run on both kinds of clusters: those that reach a cluster, and use nothing that only a playground has.

Decided from the source, without running any: from a test through its fixtures, and through the functions, classes and values of
`tests` that these use. The methods of a class count if something that was reached calls one of that name.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tests.support.tools import ROOT

Definition: TypeAlias = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
CONTRACT = "tests.support.live_cluster"
OPAQUE = {
    CONTRACT,
    "tests.support.cluster_contract",
    "tests.support.playground_admin",
    "tests.support.real_cluster",
    "tests.support.real_servers",
}
"""Modules that are not looked into: the contract and its providers."""
VERBS = {
    "fail": "failpoints",
    "failing": "failpoints",
    "hits": "failpoints",
    "relent": "failpoints",
    "disarm": "failpoints",
    "calls": "counts the calls of stores",
    "forget_calls": "counts the calls of stores",
    "fatal_requests": "requests that would kill a store",
    "pardon": "requests that would kill a store",
}
SETTINGS = {
    "clock_ahead": "a clock of its own",
    "cluster_id": "a chosen cluster id",
    "data_weight": "played sizes",
    "feed_quota": "a small quota of feeds",
    "gc_barriers": "a played version",
    "keyspace_split_delay": "played delays",
    "pd_advertises": "played addresses",
    "region_split_size": "played sizes",
    "store_speed": "played speed",
    "tikv_version": "a played version",
    "ts_sync_delay": "played delays",
}
MODULES = {
    "tests.support.http_pd": "scripted answers",
    "tests.support.one_store": "scripted answers",
    "tests.support.scripted_grpc": "scripted answers",
}
FUNCTIONS = {
    ("tests.support.history", "read"): "reads the files of a playground",
    ("tests.support.playground_admin", "PlaygroundAdmin"): "the admin API of a playground",
}
REAL_PARTS = {"TlsSettings", "EtcdServer"}
"""What of `tikv_br.playground` is no emulator."""


@dataclass(frozen=True)
class Verdict:
    """What a test needs."""

    clusters: bool
    """Whether it starts any, or uses one that a fixture started."""
    reasons: frozenset[str]
    """Why it needs a playground; empty: it does not."""


@dataclass
class Module:
    """The names of a module's top level."""

    path: Path
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Module and name there; the name is empty for a module itself."""

    @functools.cached_property
    def fixtures(self) -> dict[str, ast.FunctionDef]:
        """The fixtures by name."""
        return {
            name: node
            for name, node in self.definitions.items()
            if isinstance(node, ast.FunctionDef) and _fixture_decorator(node) is not None
        }


@functools.cache
def _module(path: Path) -> Module:
    found = Module(path)
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.definitions[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.definitions[name] = node
            case ast.ImportFrom(module=module, names=names) if module:
                for alias in names:
                    found.imports[alias.asname or alias.name] = module, alias.name
    return found


def _path_of(module: str) -> Path | None:
    base = ROOT / module.replace(".", "/")
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _fixture_decorator(node: ast.FunctionDef) -> str | None:
    return next((text for text in map(ast.unparse, node.decorator_list) if text.startswith("pytest.fixture")), None)


@dataclass
class _Search:
    """What is reached from a test."""

    clusters: bool = False
    reasons: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    classes: list[tuple[Module, ast.ClassDef]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def visit(self, module: Module, node: ast.AST) -> None:
        if id(node) in self.seen:
            return
        self.seen.add(id(node))
        if isinstance(node, ast.ClassDef):
            self.classes.append((module, node))
            for base in (*node.bases, *node.decorator_list):
                self._scan(module, base)
            for part in node.body:
                if not isinstance(part, ast.FunctionDef):
                    self._scan(module, part)
            return
        if isinstance(node, ast.FunctionDef) and (_fixture_decorator(node) or node.name.startswith("test")):
            for name in _parameters(node):
                self.visit_fixture(module, name)
        self._scan(module, node)

    def visit_fixture(self, module: Module, name: str) -> None:
        for place in (module, *_conftests(module.path)):
            if (node := place.fixtures.get(name)) is not None and id(node) not in self.seen:
                return self.visit(place, node)
        return None

    def visit_methods(self) -> bool:
        """Visit methods that something calls by now; whether there were any."""
        before = len(self.seen)
        for module, node in list(self.classes):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and (part.name in self.attributes or part.name.startswith("__")):
                    self.visit(module, part)
        return len(self.seen) > before

    def _scan(self, module: Module, root: ast.AST) -> None:
        for node in _without_annotations(root):
            match node:
                case ast.Name(id=name):
                    self._name(module, name)
                case ast.Attribute(value=value, attr=attribute):
                    self.attributes.add(attribute)
                    if isinstance(value, ast.Name) and (place := module.imports.get(value.id)):
                        self._import(f"{place[0]}.{place[1]}", attribute)
                case ast.Call():
                    self._call(node)
                case ast.Dict(keys=keys):
                    for key in keys:
                        if isinstance(key, ast.Constant) and key.value in SETTINGS and key.value != "cluster_id":
                            self.reasons.add(SETTINGS[key.value])

    def _name(self, module: Module, name: str) -> None:
        if name in module.definitions:
            self.visit(module, module.definitions[name])
        elif name in module.imports:
            self._import(*module.imports[name])

    def _import(self, source: str, name: str) -> None:
        if source == CONTRACT and name == "live_cluster":
            self.clusters = True
        elif (source, name) in FUNCTIONS:
            self.reasons.add(FUNCTIONS[source, name])
        elif source.startswith("tikv_br.playground") or (source, name) == ("tikv_br", "playground"):
            if name not in REAL_PARTS:
                self.reasons.add("starts a playground itself")
        elif source in MODULES:
            self.reasons.add(MODULES[source])
        elif source.split(".", maxsplit=1)[0] == "tests" and source not in OPAQUE and (path := _path_of(source)):
            there = _module(path)
            if name in there.definitions:
                self.visit(there, there.definitions[name])
            elif name in there.imports:
                self._import(*there.imports[name])

    def _call(self, node: ast.Call) -> None:
        named = ast.unparse(node.func)
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        for keyword in node.keywords:
            if keyword.arg in SETTINGS and (keyword.arg != "cluster_id" or named == "live_cluster"):
                self.reasons.add(SETTINGS[keyword.arg])
        if first == "playground" and len(node.args) > 1:
            self.reasons.add("starts a playground itself")
        if not isinstance(node.func, ast.Attribute) or named.startswith("pytest."):
            return
        attribute = node.func.attr
        is_starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        if attribute in VERBS and not (attribute == "fail" and len(node.args) < 2 and not is_starred):
            self.reasons.add(VERBS[attribute])
        is_view = isinstance(first, str) and (first.startswith("/playground/") or first in {"failpoints", "feeds"})
        if attribute == "get" and is_view:
            self.reasons.add("the admin API of a playground")
        if attribute == "run" and isinstance(first, str) and first.replace("-", "").isalpha() and node.keywords:
            self.reasons.add("the admin API of a playground")


def _parameters(node: ast.FunctionDef) -> Iterator[str]:
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        yield argument.arg
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.usefixtures":
            yield from (str(argument.value) for argument in decorator.args if isinstance(argument, ast.Constant))


def _conftests(path: Path) -> Iterator[Module]:
    for folder in path.parents:
        if (conftest := folder / "conftest.py").is_file():
            yield _module(conftest)
        if folder == ROOT / "tests":
            return


def _without_annotations(root: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of type hints: a hint uses nothing."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name not in {"annotation", "returns"}:
                waiting += [
                    child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
                ]


@functools.cache
def verdict(path: Path, name: str) -> Verdict:
    """What the test of this name in a module needs."""
    module, search = _module(path), _Search()
    if name in module.definitions:
        search.visit(module, module.definitions[name])
    else:  # of another module, or of a class
        methods = [part for node in module.definitions.values() if isinstance(node, ast.ClassDef) for part in node.body]
        for part in methods:
            if isinstance(part, ast.FunctionDef) and part.name == name:
                search.visit(module, part)
    for place in (module, *_conftests(path)):
        for node in place.fixtures.values():
            if "autouse=True" in (_fixture_decorator(node) or ""):
                search.visit(place, node)
    while search.visit_methods():
        pass
    return Verdict(search.clusters, frozenset(search.reasons))
