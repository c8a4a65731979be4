"""One of several processes that run a pipeline together; started by tests.

`python -m tests.devices.worker ADDRESS NUM_PROCESSES PROCESS_ID VICTIM`: all
compare the pipeline with the simulator and a sweep with single runs, then run
on, until VICTIM is killed.
"""

import itertools
import os
import signal
import sys

import jax
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain

_NUM_STAGES = 4
HEARTBEAT_TIMEOUT_SECONDS = 10
_BOTH = {"lwp": 1.0, "sc": 1.0}
_LONG = {
  "pb": {},
  "pb_lwpvd_scd": _BOTH,
  "pb_accumulate3_lwpvd_scd": {"accumulate": 3, **_BOTH},
  "pb_lwpvd_scd_stash": {"consistency": "stash", **_BOTH},
}
SETTINGS = {
  **(_LONG if "PBP_LONG" in os.environ else {}),
  "pb_accumulate3_lwpvd_scd_stash": {
    "accumulate": 3,
    "consistency": "stash",
    **_BOTH,
  },
}


def compare(name):
  """Says how a case went; returns what it takes to run on."""
  simulator = _simulator(SETTINGS[name])
  inputs, targets = chain.samples(40)
  expected = chain.started(simulator, inputs[0])
  expected, metrics = simulator.run(expected, inputs, targets)
  pipeline = chain.on_devices(simulator, (inputs[0], targets[0]))
  state = pipeline.init(jax.random.key(0))
  run = lambda state: pipeline.run(state, inputs, targets, drain=True)
  state, found = run(state)
  gathered = pipeline.gather(state)
  jax.tree.map(
    lambda got, wanted: np.testing.assert_allclose(
      got, wanted, rtol=0, atol=1e-10
    ),
    (np.asarray(found["loss"]), gathered.params, gathered.opt_state),
    (np.asarray(metrics["loss"]), expected.params, expected.opt_state),
  )
  print("EQUAL", name, flush=True)
  return run, state


def compare_sweep():
  """Says whether runs that the devices share are the runs one by one."""
  inputs, targets = map(np.asarray, chain.samples(12))
  schedule = pbp.schedules.pipelined_backprop(3)

  def train(rate, delay):
    simulator = pbp.Simulator(
      chain.stages()[:2] + chain.stages()[-1:],
      chain.squared_error,
      optax.chain(
        pbp.spike_compensation(chain.MOMENTUM, delay),
        optax.scale_by_learning_rate(rate),
      ),
      schedule,
    )
    state = simulator.init(jax.random.key(0), inputs[0])
    state, metrics = simulator.run(state, inputs, targets)
    return metrics["loss"], state.params

  rates = np.array([0.01, 0.02, 0.05, 0.02, 0.01])
  delays = np.array([1.0, 2.0])[[0, 0, 1, 1, 1], None] * schedule.delay
  found = pbp.devices.sweep(train, rates, delays)
  alone = jax.jit(train)
  for i, numbers in enumerate(zip(rates, delays, strict=True)):
    jax.tree.map(
      lambda got, wanted, i=i: np.testing.assert_allclose(
        got[i], wanted, rtol=0, atol=1e-14
      ),
      found,
      alone(*numbers),
    )
  losses = found[0]
  assert losses.shape == (5, 12), losses.shape
  assert len(np.unique(losses[:, -1])) == 5, losses
  print("EQUAL sweep", flush=True)


def run_on(run, state, victim):
  """Runs for ever, but for one process, which kills itself."""
  for chunk in itertools.count():
    state, metrics = run(state)
    np.asarray(metrics["loss"])
    if chunk == 2 and jax.process_index() == victim:
      print("KILLED", flush=True)
      os.kill(os.getpid(), signal.SIGKILL)


def _simulator(settings):
  whole = chain.simulator(settings)
  schedule = pbp.schedules.pipelined_backprop(
    _NUM_STAGES, settings.get("accumulate", 1)
  )
  if settings.get("consistency") == "stash":
    schedule = schedule.with_weight_stashing()
  return pbp.Simulator(
    whole.stages[:3] + whole.stages[4:],
    whole.loss_fn,
    chain.optimizer(settings, schedule.delay),
    schedule,
  )


def main(address, num_processes, process_id, victim):
  jax.distributed.initialize(
    address,
    num_processes=int(num_processes),
    process_id=int(process_id),
    initialization_timeout=60,
    heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
  )
  for name in SETTINGS:
    last = compare(name)
  compare_sweep()
  run_on(*last, int(victim))


if __name__ == "__main__":
  main(*sys.argv[1:])
