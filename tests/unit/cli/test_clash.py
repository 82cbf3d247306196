"""Packages that hide ours are said clearly."""

from __future__ import annotations

import sys
import types

import pytest

from tikv_br.cli.main import check_packages
from tikv_br.errors import PackageClash


def test_our_own_packages_pass() -> None:
    """In a proper installation there is nothing to say."""
    check_packages()


def test_foreign_package_of_the_same_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twisted's ``incremental`` in our environment is an error with its place and the way out."""
    foreign = types.ModuleType("incremental")
    foreign.__file__ = "/site-packages/incremental/__init__.py"
    monkeypatch.setitem(sys.modules, "incremental", foreign)
    with pytest.raises(PackageClash, match=r"/site-packages/incremental/__init__\.py is not part of tikv-br") as caught:
        check_packages()
    assert "pipx install" in caught.value.hint


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-removed installation is said too."""
    monkeypatch.setitem(sys.modules, "formats", None)
    with pytest.raises(PackageClash, match="cannot import tikv-br's package `formats`"):
        check_packages()
