"""Options that several commands take together: a dataclass of them stands for all in a command's signature."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

from tikv_br.cli import options

if TYPE_CHECKING:
    from tikv_br.cluster.config import ClusterConfig

Session = TypeVar("Session")
Group = TypeVar("Group", bound="OptionGroup")


class OptionGroup:
    """Base of dataclasses whose fields are options, annotated as a command's parameters are."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags(OptionGroup):
    """The flags that name a cluster, not looked at yet."""

    pd: options.PdOption = dataclasses.field(default_factory=lambda: options.DEFAULT_PD)
    ca: options.CaOption = None
    cert: options.CertOption = None
    key: options.KeyOption = None

    def config(self) -> ClusterConfig:
        """The cluster that they name. Raises `UsageError`."""
        from tikv_br.cluster.config import ClusterConfig

        return ClusterConfig.from_flags(self.pd, ca=self.ca, cert=self.cert, key=self.key)


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function with keyword parameters a command: each that is an option group becomes the group's options."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    groups = {each.name: each.annotation for each in parameters if _is_group(each.annotation)}

    @functools.wraps(function)
    def run(**flags: Any) -> None:  # noqa: ANN401 - typer passes what the signature below says
        for name, group in groups.items():
            flags[name] = group(**{field.name: flags.pop(field.name) for field in dataclasses.fields(group)})
        function(**flags)

    _sign(run, [part for each in parameters for part in (_parts(groups[each.name]) if each.name in groups else [each])])
    return run


def session_command(
    group: type[Group],
    open_session: Callable[[Group], AbstractContextManager[Session]],
    function: Callable[Concatenate[Session, ...], None],
) -> Callable[..., None]:
    """Make a function whose first parameter is a session a command with the group's options behind its own."""

    @functools.wraps(function)
    def run(*, session_flags: Group, **flags: Any) -> None:  # noqa: ANN401 - as above
        with open_session(session_flags) as session:
            function(session, **flags)

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    _sign(run, [*own, inspect.Parameter("session_flags", inspect.Parameter.KEYWORD_ONLY, annotation=group)])
    return grouped(run)


def _is_group(annotation: object) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, OptionGroup)


def _parts(group: Any) -> list[inspect.Parameter]:  # noqa: ANN401 - a dataclass
    """The options of a group, as parameters; those that must be said come first."""
    hints = typing.get_type_hints(group, include_extras=True)
    parts = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]
    return sorted(parts, key=lambda part: part.default is not inspect.Parameter.empty)


def _default(field: dataclasses.Field[Any]) -> Any:  # noqa: ANN401 - whatever the option's type is
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _sign(run: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """Give a function the signature that typer is to read."""
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in keywords}
