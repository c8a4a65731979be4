"""Mitigations of delay as optax links and views, one file a method."""

from pbp_jax.transforms.clipping import clip_by_stage_norm as clip_by_stage_norm
from pbp_jax.transforms.delay_gradients import (
  DelayGradientsState as DelayGradientsState,
)
from pbp_jax.transforms.delay_gradients import (
  delay_gradients as delay_gradients,
)
from pbp_jax.transforms.spike_compensation import (
  SpikeCompensationState as SpikeCompensationState,
)
from pbp_jax.transforms.spike_compensation import (
  spike_coefficients as spike_coefficients,
)
from pbp_jax.transforms.spike_compensation import (
  spike_compensation as spike_compensation,
)
from pbp_jax.transforms.views import predict_params as predict_params
from pbp_jax.transforms.weight_prediction import (
  VelocityPredictionState as VelocityPredictionState,
)
from pbp_jax.transforms.weight_prediction import (
  WeightPredictionState as WeightPredictionState,
)
from pbp_jax.transforms.weight_prediction import (
  linear_weight_prediction as linear_weight_prediction,
)
