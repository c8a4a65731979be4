"""Functions evaluated one operation at a time.

A compiled program is compiled as a whole, however often it does the same:
drawing the weights of 170 equal stages takes a minute to compile and no time to
run. One operation at a time, equal ones are compiled once.
"""

from collections.abc import Callable
import itertools
from typing import ParamSpec, TypeVar

import jax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval
import jax.numpy as jnp

_P = ParamSpec("_P")
_R = TypeVar("_R")


def op_by_op(function: Callable[_P, _R]) -> Callable[_P, _R]:
  """Makes a function run what its results need, one operation at a time.

  The function is traced once for arguments of the same shapes and dtypes, as by
  `jax.jit`. Operations whose results nobody needs are left out; functions that
  it calls through `jax.jit` (`jax.random.normal` is one) are one operation. May
  differ from the compiled function by rounding: a compiler merges what follows
  one another.

  Args:
    function: A pure function of pytrees of arrays; where no result needs an
      argument, it may be a `jax.ShapeDtypeStruct` of one.

  Returns:
    The function. Its results are new arrays, as those of `jax.jit` are.

  Example:
    >>> import jax
    >>> draw = op_by_op(lambda key: jax.random.normal(key, (2,)))
    >>> draw(jax.random.key(0)).shape
    (2,)
  """

  def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    traced, results = jax.make_jaxpr(function, return_shape=True)(
      *args, **kwargs
    )
    needed, is_needed = partial_eval.dce_jaxpr(
      traced.jaxpr, [True] * len(traced.jaxpr.outvars)
    )
    evaluate = jex_core.jaxpr_as_fun(
      jex_core.ClosedJaxpr(needed, traced.consts)
    )
    leaves = itertools.compress(jax.tree.leaves((args, kwargs)), is_needed)
    # Copied: a result may be an argument or closed over.
    copies = map(jnp.copy, evaluate(*map(jnp.asarray, leaves)))
    return jax.tree.unflatten(jax.tree.structure(results), copies)

  return call
