"""How options are given: by arguments or METRONOME_... variables, with ranges for help and errors."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from app.settings import ENV_PREFIX, Group, Settings, SettingsError

# Not the server's, so none of its business:
OTHER_ENV_PREFIXES = ("METRONOME_TALK_", "METRONOME_LOAD_", "METRONOME_TEST_")


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the tree, as help and errors show it."""

    path: tuple[str, ...]
    info: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + "_".join(self.path).upper()

    @property
    def is_bool(self) -> bool:
        return bool in (self.info.annotation, *get_args(self.info.annotation))

    @property
    def is_secret(self) -> bool:
        """No flag: a command line can be read by every user of the machine."""
        return self.info.annotation is SecretStr

    @property
    def range(self) -> str:
        """What may be given, for people."""
        annotation = self.info.annotation
        may_be_none = type(None) in get_args(annotation)
        if get_origin(annotation) is Literal:
            return " | ".join(get_args(annotation))
        low = high = None
        for bound in self._bounds():
            if isinstance(bound, annotated_types.Ge):
                low = f"{bound.ge}"
            elif isinstance(bound, annotated_types.Gt):
                low = f"more than {bound.gt}"
            elif isinstance(bound, annotated_types.Le):
                high = f"{bound.le}"
        what = "true or false" if self.is_bool else "text"
        if low is not None:
            what = f"{low} to {high}"
        return f"{what}, or none" if may_be_none else what

    def _bounds(self) -> Iterator[Any]:
        """Bounds of the field itself and of an `Annotated` type inside `... | None`."""
        inner = (bound for kind in get_args(self.info.annotation) for bound in get_args(kind)[1:])
        for item in (*self.info.metadata, *inner):
            yield from item.metadata if isinstance(item, FieldInfo) else (item,)

    @property
    def default(self) -> str:
        value = self.info.default
        return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def options(model: type[BaseModel] = Settings, path: tuple[str, ...] = ()) -> list[Option]:
    """Every option, in the order they are declared."""
    found: list[Option] = []
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Group):
            found += options(kind, (*path, name))
        else:
            found.append(Option((*path, name), info))
    return found


def load(arguments: Mapping[tuple[str, ...], Any] | None = None) -> Settings:
    """Settings from the environment, overridden by `arguments` (option path -> value, texts allowed).

    Raises SettingsError, naming every option that is wrong.
    """
    _refuse_unknown_variables()
    tree: dict[str, Any] = {}
    for path, value in (arguments or {}).items():
        group = tree
        for name in path[:-1]:
            group = group.setdefault(name, {})
        group[path[-1]] = None if isinstance(value, str) and value.lower() == "none" else value
    try:
        return Settings(**tree)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(item) for item in error.errors())) from None


def _refuse_unknown_variables() -> None:
    known = {option.env for option in options()}
    lines = []
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith(ENV_PREFIX) or upper.startswith(OTHER_ENV_PREFIXES) or upper in known:
            continue
        nearest = difflib.get_close_matches(upper, known, n=1, cutoff=0.0)[0]
        lines.append(f"{name}: no such option; the nearest is {nearest}")
    if lines:
        raise SettingsError("\n".join(lines))


def _explain(error: Any) -> str:
    path = tuple(str(part) for part in error["loc"])
    for option in options():
        if option.path == path[: len(option.path)]:
            given = error["input"]
            return f"{option.flag} ({option.env}): must be {option.range}; got {given!r}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{'.'.join(path)}: {error['msg']}"
