"""The chain of `known_answers/README.md` and its cases, for the simulator."""

import jax
import jax.numpy as jnp
import optax

import pbp_jax as pbp
from tests.reference import known_answers

LEARNING_RATE = known_answers.LEARNING_RATE
MOMENTUM = known_answers.MOMENTUM
NUM_STAGES = known_answers.NUM_STAGES


def dense_tanh(params, x):
  return jnp.tanh(x @ params["w"] + params["b"][None])


def given(params, apply=dense_tanh):
  """A stage that starts from given weights, in the precision that is on."""
  start = lambda: {name: jnp.asarray(leaf) for name, leaf in params.items()}
  return pbp.Stage(init=lambda key, x: start(), apply=apply)


def stages():
  return tuple(map(given, known_answers.params()))


def samples(count=known_answers.NUM_MICRO_BATCHES):
  inputs, targets = known_answers.samples()
  return jnp.asarray(inputs[:count]), jnp.asarray(targets[:count])


def started(simulator, example):
  """The initial state; op by op, which compiles less than `init` as one."""
  with jax.disable_jit():
    return simulator.init(jax.random.key(0), example)


def on_devices(simulator, example):
  """The pipeline on devices of what a simulator simulates."""
  return pbp.devices.Pipeline(
    simulator.stages,
    simulator.loss_fn,
    simulator.optimizer,
    simulator.schedule,
    example=example,
    backward=simulator.backward,
  )


def squared_error(y, target):
  return 0.5 * jnp.sum((y - target) ** 2)


def schedule(settings):
  """The schedule that a case's settings ask for."""
  interval = settings.get("accumulate", 1)
  if not settings.get("pipelined", True):
    return pbp.schedules.fill_drain(NUM_STAGES, interval)
  made = pbp.schedules.pipelined_backprop(NUM_STAGES, interval)
  if settings.get("consistency") == "stash":
    return made.with_weight_stashing()
  return made


def optimizer(settings, delay):
  """The chain of links that a case's settings ask for."""
  links = []
  if "weight_decay" in settings:
    links.append(optax.add_decayed_weights(settings["weight_decay"]))
  if "sc" in settings:
    links.append(pbp.spike_compensation(MOMENTUM, settings["sc"] * delay))
  else:
    links.append(optax.trace(MOMENTUM))
  links.append(optax.scale_by_learning_rate(LEARNING_RATE))
  if "lwp" in settings:
    form = settings.get("form", "velocity")
    rate = LEARNING_RATE if form == "velocity" else None
    links.append(
      pbp.linear_weight_prediction(settings["lwp"] * delay, form, rate)
    )
  return optax.chain(*links)


def simulator(settings=None, **options):
  """The simulator of a case; options take the place of its parts."""
  settings = settings or {}
  made = schedule(settings)
  consistency = settings.get("consistency", "saved")
  arguments = {
    "optimizer": None,
    "schedule": made,
    "backward": "saved" if consistency == "stash" else consistency,
    **options,
  }
  if arguments["optimizer"] is None:
    arguments["optimizer"] = optimizer(settings, made.delay)
  return pbp.Simulator(stages(), squared_error, **arguments)
