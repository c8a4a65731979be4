"""The registry of mitigations: the words that `presets.make_arm` combines."""

from pbp_jax.mitigations import entry, on_updates, on_views, published_views
from pbp_jax.mitigations.entry import ROLES as ROLES
from pbp_jax.mitigations.entry import Context as Context
from pbp_jax.mitigations.entry import Mitigation as Mitigation

MITIGATIONS: dict[str, Mitigation] = entry.merge(
  on_updates.MITIGATIONS,
  on_views.MITIGATIONS,
  published_views.MITIGATIONS,
)
