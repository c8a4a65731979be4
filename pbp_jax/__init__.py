"""A simulator of asynchronous pipelined training; the public names."""

from pbp_jax import devices as devices
from pbp_jax import diagnostics as diagnostics
from pbp_jax import models as models
from pbp_jax import presets as presets
from pbp_jax import quadratic as quadratic
from pbp_jax import schedules as schedules
from pbp_jax.backward_state import BackwardState as BackwardState
from pbp_jax.hyperparameters import (
  scale_hyperparameters as scale_hyperparameters,
)
from pbp_jax.simulator import PipelineState as PipelineState
from pbp_jax.simulator import Simulator as Simulator
from pbp_jax.stages import Stage as Stage
from pbp_jax.stages import as_stages as as_stages
from pbp_jax.stages import stateful_stage as stateful_stage
from pbp_jax.stages import with_params as with_params
from pbp_jax.transforms import (
  adaptive_delay_compensation as adaptive_delay_compensation,
)
from pbp_jax.transforms import asynchronous_nesterov as asynchronous_nesterov
from pbp_jax.transforms import clip_by_stage_norm as clip_by_stage_norm
from pbp_jax.transforms import delay_compensation as delay_compensation
from pbp_jax.transforms import delay_gradients as delay_gradients
from pbp_jax.transforms import discrepancy_correction as discrepancy_correction
from pbp_jax.transforms import error_feedback as error_feedback
from pbp_jax.transforms import gap_aware as gap_aware
from pbp_jax.transforms import (
  linear_weight_prediction as linear_weight_prediction,
)
from pbp_jax.transforms import msnag as msnag
from pbp_jax.transforms import msnag_adam as msnag_adam
from pbp_jax.transforms import nadam_momentum as nadam_momentum
from pbp_jax.transforms import pipeoptim as pipeoptim
from pbp_jax.transforms import predict_params as predict_params
from pbp_jax.transforms import reconstructed_weights as reconstructed_weights
from pbp_jax.transforms import (
  scale_by_asynchronous_nadam as scale_by_asynchronous_nadam,
)
from pbp_jax.transforms import (
  scale_by_basis_rotation as scale_by_basis_rotation,
)
from pbp_jax.transforms import scale_by_stage as scale_by_stage
from pbp_jax.transforms import scale_by_staleness as scale_by_staleness
from pbp_jax.transforms import shrink_errors as shrink_errors
from pbp_jax.transforms import shrink_gradients as shrink_gradients
from pbp_jax.transforms import spectrain as spectrain
from pbp_jax.transforms import spike_compensation as spike_compensation
from pbp_jax.transforms import (
  stage_adaptive_momentum as stage_adaptive_momentum,
)
from pbp_jax.transforms import stage_momenta as stage_momenta
from pbp_jax.transforms import stage_rate_factors as stage_rate_factors
from pbp_jax.transforms import xpipe as xpipe
from pbp_jax.transforms import xpipe_horizons as xpipe_horizons
