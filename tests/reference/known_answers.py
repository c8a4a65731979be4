"""The chain of `known_answers/README.md`, and its cases."""

import json
import pathlib

import numpy as np

from tests.reference import optimizers, pipeline, stages, timetables

_FOLDER = pathlib.Path(__file__).parent.parent / "known_answers"
WIDTHS = (3, 4, 4, 4, 4, 2)
NUM_STAGES = 5
NUM_MICRO_BATCHES = 200
LEARNING_RATE = 0.02
MOMENTUM = 0.9


def load(name):
  return json.loads((_FOLDER / f"{name}.json").read_text())


def params():
  """The initial parameters of the five stages."""
  return [
    {
      "w": 0.5
      * np.sin(1 + 100 * s + 10 * np.arange(a)[:, None] + np.arange(c)),
      "b": np.zeros(c),
    }
    for s, (a, c) in enumerate(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))
  ]


def samples():
  """Inputs and targets, each [micro-batch, batch of one, feature]."""
  i = np.arange(NUM_MICRO_BATCHES)[:, None, None]
  inputs = np.sin(1.3 * i + 0.7 * np.arange(WIDTHS[0]))
  targets = np.cos(0.9 * i + 0.4 * np.arange(WIDTHS[-1]))
  return inputs, targets


def run(settings):
  """Runs a case's settings through the twin."""
  interval = settings.get("accumulate", 1)
  pipelined = settings.get("pipelined", True)
  delays = [2 * (NUM_STAGES - 1 - s) / interval for s in range(NUM_STAGES)]
  if not pipelined:
    delays = [0.0] * NUM_STAGES
  scaled = lambda name: [settings.get(name, 0.0) * d for d in delays]
  if settings.get("form", "velocity") == "velocity":
    view = optimizers.velocity_prediction(scaled("lwp"), LEARNING_RATE)
  else:
    view = optimizers.weight_prediction(scaled("lwp"))
  table = timetables.pipelined_backprop if pipelined else timetables.synchronous
  return pipeline.run(
    table(NUM_STAGES, NUM_MICRO_BATCHES),
    [stages.dense_tanh] * NUM_STAGES,
    params(),
    optimizers.sgdm(
      LEARNING_RATE,
      MOMENTUM,
      weight_decay=settings.get("weight_decay", 0.0),
      compensation=optimizers.spike_compensation(MOMENTUM, scaled("sc")),
    ),
    stages.squared_error,
    *samples(),
    update_interval=interval,
    consistency={"stash": "stashed"}.get(
      settings.get("consistency", "saved"), settings.get("consistency", "saved")
    ),
    forward_view=view,
  )
