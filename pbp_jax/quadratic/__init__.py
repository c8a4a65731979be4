r"""Delayed optimization of a quadratic, in closed form.

On a quadratic every linear method moves each eigendirection on its own, so
one weight :math:`w` with curvature :math:`\lambda` tells everything. With
learning rate :math:`\eta`, momentum :math:`m`, a gradient that arrives
:math:`D` updates late and was taken at predicted weights :math:`\hat w`,

.. math::

  g_t &= \lambda \hat w_{t-D}, \qquad v_{t+1} = m v_t + g_t, \qquad
  w_{t+1} = w_t - \eta (a v_{t+1} + b g_t), \\
  \hat w_t &= w_t - \eta T_v v_t + T_w (w_t - w_{t-1}).

Putting :math:`w_t = z^t` gives the characteristic polynomial, with
:math:`L = \eta\lambda`, called `rate` here,

.. math::

  z^{D+1} (z-1) (z-m) + L \{ [(a+b) z - b m] [(1+T_w) z - T_w]
  + T_v z (z-1) \}.

Its largest root modulus is the factor by which the error shrinks in an
update. All methods of the project that are linear and not adaptive are choices
of :math:`(a, b, T_v, T_w)`: see `Method`. Both passes see the same weights
here, as with weight stashing.

Precision: roots near one decide everything, so work in float64, inside `with
jax.enable_x64(True):`. In float32 `spectral_radius` is good to about 1e-3
where roots meet, and `stability_limit` and `best_hyperparameters` refuse to
run. All of it is made for the CPU, where LAPACK finds the eigenvalues;
nothing here was tried on an accelerator.

The polynomials were derived for this project, one for all methods instead of
one a method. Spike compensation and linear weight prediction are as published
in Kosson et al., "Pipelined Backpropagation at Scale", 2020,
https://arxiv.org/abs/2003.11666 (not re-read at the source).
"""

from pbp_jax.quadratic.optimum import (
  Optimum,
  best_hyperparameters,
  worst_radius,
)
from pbp_jax.quadratic.polynomials import (
  METHOD_NAMES,
  Coefficients,
  Method,
  characteristic_polynomial,
  effective_horizon,
  half_life,
  impulse_response,
  named_method,
  spectral_radius,
)
from pbp_jax.quadratic.stability import stability_limit

__all__ = [
  "METHOD_NAMES",
  "Coefficients",
  "Method",
  "Optimum",
  "best_hyperparameters",
  "characteristic_polynomial",
  "effective_horizon",
  "half_life",
  "impulse_response",
  "named_method",
  "spectral_radius",
  "stability_limit",
  "worst_radius",
]
