"""Command-line flags made from a configuration's dataclass.

The dataclass is the one place for names, types, defaults and descriptions.
Flags are defined when a program calls `define` under its `__main__` guard,
never at import, so two programs can be imported into one process.
"""

import dataclasses
import inspect
import re
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from absl import flags

# `--help` shows the flags of the program: those made here are its own.
flags.disclaim_key_flags()

_Config = TypeVar("_Config")


def define(
  config_class: type, flag_values: flags.FlagValues = flags.FLAGS
) -> None:
  """Defines one flag for each field of a configuration.

  Args:
    config_class: A dataclass with a default for every field. Its docstring
      describes each under `Attributes:`, which becomes the flag's help. Types
      are str, int, float, bool, or tuple[item, ...] of str, int or float, given
      separated by commas.
    flag_values: Where to define them.

  Raises:
    ValueError: If a field has no description, or another type.

  Example:
    >>> import dataclasses
    >>> from absl import flags
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Config:
    ...   '''Settings.
    ...
    ...   Attributes:
    ...     rates: Learning rates.
    ...   '''
    ...   rates: tuple[float, ...] = (0.1,)
    >>> values = flags.FlagValues()
    >>> define(Config, values)
    >>> _ = values(["program", "--rates=.5,1"])
    >>> from_flags(Config, values)
    Config(rates=(0.5, 1.0))
  """
  descriptions = _descriptions(config_class)
  types = get_type_hints(config_class)
  for field in dataclasses.fields(config_class):
    if field.name not in descriptions:
      raise ValueError(
        f"{config_class.__name__}.{field.name} must be described under"
        " `Attributes:` in its docstring."
      )
    help_text = descriptions[field.name]
    kind = types[field.name]
    default: Any = field.default
    options: dict[str, Any] = {"flag_values": flag_values}
    if kind is bool:
      flags.DEFINE_bool(field.name, default, help_text, **options)
    elif kind is int:
      flags.DEFINE_integer(field.name, default, help_text, **options)
    elif kind is float:
      flags.DEFINE_float(field.name, default, help_text, **options)
    elif kind is str:
      flags.DEFINE_string(field.name, default, help_text, **options)
    elif get_origin(kind) is tuple and get_args(kind)[0] in (str, int, float):
      text = [str(item) for item in default]
      flags.DEFINE_list(field.name, text, help_text, **options)
    else:
      raise ValueError(
        f"{config_class.__name__}.{field.name} must be a str, int, float,"
        f" bool, or tuple[item, ...] of str, int or float, got {kind}."
      )


def from_flags(
  config_class: type[_Config], flag_values: flags.FlagValues = flags.FLAGS
) -> _Config:
  """Makes the configuration that the parsed flags say.

  Args:
    config_class: The dataclass given to `define`.
    flag_values: Where its flags are.

  Returns:
    An instance.

  Raises:
    ValueError: If an item of a tuple of numbers is no number.
  """
  types = get_type_hints(config_class)
  values = {}
  for name, kind in types.items():
    value: Any = flag_values[name].value
    if get_origin(kind) is tuple:
      item_type = get_args(kind)[0]
      try:
        value = tuple(item_type(item) for item in value)
      except ValueError as error:
        raise ValueError(
          f"--{name} must be numbers separated by commas, got"
          f" {','.join(value)!r}."
        ) from error
    values[name] = value
  return config_class(**values)


def _descriptions(config_class: type) -> dict[str, str]:
  """The entries under `Attributes:` of a Google-style docstring."""
  lines = (inspect.getdoc(config_class) or "").splitlines()
  if "Attributes:" not in lines:
    return {}
  descriptions: dict[str, str] = {}
  name = None
  for line in lines[lines.index("Attributes:") + 1 :]:
    if line and not line.startswith(" "):
      break  # the next section
    entry = re.match(r" {2}(\w+): (.*)", line)
    if entry:
      name, text = entry.groups()
      descriptions[name] = text
    elif name and line.strip():
      descriptions[name] += " " + line.strip()
  return descriptions
