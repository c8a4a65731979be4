"""Results that XLA keeps in memory instead of computing them again.

XLA merges a cheap operation into every loop that reads its result. On a CPU
that is a loss where the operation is an access by index: what should be a loop
over consecutive numbers, several at a time, becomes one that computes an
address for each. A call that XLA may not inline has its result in memory.
"""

from collections.abc import Callable
import functools
from typing import Any, ParamSpec, TypeVar

import jax
from jax.experimental import xla_metadata

_P = ParamSpec("_P")
_R = TypeVar("_R")


def materialized(
  static_argnums: int | tuple[int, ...] = (),
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
  """Decorates a function whose results XLA is to keep in memory on a CPU.

  The function's value and derivatives are what they were. On a GPU or TPU
  nothing is changed: there merging is what saves time. The choice is made while
  tracing, from `jax.default_backend()`.

  Args:
    static_argnums: Which arguments are no arrays, as for `jax.jit`.

  Returns:
    A decorator.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> @materialized(static_argnums=1)
    ... def repeat(x, times):
    ...   return jnp.repeat(x, times)
    >>> text = jax.jit(lambda x: repeat(x, 2) + 1).lower(jnp.ones(3)).as_text()
    >>> 'inlineable = "false"' in text
    True
  """

  def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.partial(jax.jit, static_argnums=static_argnums)
    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> Any:
      # What the function itself calls may be inlined into it.
      with xla_metadata.set_xla_metadata(inlineable=None):
        return function(*args, **kwargs)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
      if jax.default_backend() != "cpu":
        return function(*args, **kwargs)
      with xla_metadata.set_xla_metadata(inlineable="false"):
        return compiled(*args, **kwargs)

    return call

  return decorate
