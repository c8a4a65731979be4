"""A simulator of asynchronous pipelined training; the public names."""

from pbp_jax import models as models
from pbp_jax import presets as presets
from pbp_jax import schedules as schedules
from pbp_jax.hyperparameters import (
  scale_hyperparameters as scale_hyperparameters,
)
from pbp_jax.simulator import PipelineState as PipelineState
from pbp_jax.simulator import Simulator as Simulator
from pbp_jax.stages import Stage as Stage
from pbp_jax.stages import as_stages as as_stages
from pbp_jax.transforms import clip_by_stage_norm as clip_by_stage_norm
from pbp_jax.transforms import delay_gradients as delay_gradients
from pbp_jax.transforms import (
  linear_weight_prediction as linear_weight_prediction,
)
from pbp_jax.transforms import predict_params as predict_params
from pbp_jax.transforms import spike_compensation as spike_compensation
