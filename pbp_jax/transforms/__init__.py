"""Mitigations of delay as optax links and views, one file a method."""

from pbp_jax.transforms.asynchronous_nesterov import (
  AsynchronousNadamState as AsynchronousNadamState,
)
from pbp_jax.transforms.asynchronous_nesterov import (
  AsynchronousNesterovState as AsynchronousNesterovState,
)
from pbp_jax.transforms.asynchronous_nesterov import (
  asynchronous_nesterov as asynchronous_nesterov,
)
from pbp_jax.transforms.asynchronous_nesterov import (
  nadam_momentum as nadam_momentum,
)
from pbp_jax.transforms.asynchronous_nesterov import (
  scale_by_asynchronous_nadam as scale_by_asynchronous_nadam,
)
from pbp_jax.transforms.asynchronous_nesterov import (
  stage_adaptive_momentum as stage_adaptive_momentum,
)
from pbp_jax.transforms.basis_rotation import (
  BasisRotationState as BasisRotationState,
)
from pbp_jax.transforms.basis_rotation import (
  scale_by_basis_rotation as scale_by_basis_rotation,
)
from pbp_jax.transforms.clipping import clip_by_stage_norm as clip_by_stage_norm
from pbp_jax.transforms.delay_compensation import (
  AdaptiveDelayCompensationState as AdaptiveDelayCompensationState,
)
from pbp_jax.transforms.delay_compensation import (
  adaptive_delay_compensation as adaptive_delay_compensation,
)
from pbp_jax.transforms.delay_compensation import (
  delay_compensation as delay_compensation,
)
from pbp_jax.transforms.delay_gradients import (
  DelayGradientsState as DelayGradientsState,
)
from pbp_jax.transforms.delay_gradients import (
  delay_gradients as delay_gradients,
)
from pbp_jax.transforms.direction_prediction import (
  DirectionPredictionState as DirectionPredictionState,
)
from pbp_jax.transforms.discrepancy_correction import (
  discrepancy_correction as discrepancy_correction,
)
from pbp_jax.transforms.error_feedback import (
  ErrorFeedbackState as ErrorFeedbackState,
)
from pbp_jax.transforms.error_feedback import error_feedback as error_feedback
from pbp_jax.transforms.gap_aware import GapAwareState as GapAwareState
from pbp_jax.transforms.gap_aware import gap_aware as gap_aware
from pbp_jax.transforms.gradient_shrinking import shrink_errors as shrink_errors
from pbp_jax.transforms.gradient_shrinking import (
  shrink_gradients as shrink_gradients,
)
from pbp_jax.transforms.msnag import MsnagAdamState as MsnagAdamState
from pbp_jax.transforms.msnag import MsnagState as MsnagState
from pbp_jax.transforms.msnag import msnag as msnag
from pbp_jax.transforms.msnag import msnag_adam as msnag_adam
from pbp_jax.transforms.past_weights import PastWeightsState as PastWeightsState
from pbp_jax.transforms.pipeoptim import pipeoptim as pipeoptim
from pbp_jax.transforms.reconstructed_weights import (
  reconstructed_weights as reconstructed_weights,
)
from pbp_jax.transforms.spectrain import SpecTrainState as SpecTrainState
from pbp_jax.transforms.spectrain import spectrain as spectrain
from pbp_jax.transforms.spike_compensation import (
  SpikeCompensationState as SpikeCompensationState,
)
from pbp_jax.transforms.spike_compensation import (
  spike_coefficients as spike_coefficients,
)
from pbp_jax.transforms.spike_compensation import (
  spike_compensation as spike_compensation,
)
from pbp_jax.transforms.stage_scaling import scale_by_stage as scale_by_stage
from pbp_jax.transforms.stage_scaling import stage_momenta as stage_momenta
from pbp_jax.transforms.stage_scaling import (
  stage_rate_factors as stage_rate_factors,
)
from pbp_jax.transforms.staleness_rate import (
  ScaleByStalenessState as ScaleByStalenessState,
)
from pbp_jax.transforms.staleness_rate import (
  scale_by_staleness as scale_by_staleness,
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
from pbp_jax.transforms.xpipe import xpipe as xpipe
from pbp_jax.transforms.xpipe import xpipe_horizons as xpipe_horizons
