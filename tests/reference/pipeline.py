"""The pipeline itself: workers, wires between them, and a clock."""

import collections
import typing

import numpy as np

from tests.reference import optimizers, timetables


class Result(typing.NamedTuple):
  losses: np.ndarray  # [micro-batch], met on the forward weights.
  params: list  # [stage], newest.
  forward_versions: np.ndarray  # [stage, micro-batch], version the pass read.
  backward_versions: np.ndarray
  history: list  # [stage][version] -> (params, optimizer state).


def run(
  timetable: timetables.Timetable,
  stages,
  params,
  optimizer: optimizers.Optimizer,
  loss,
  inputs,
  targets,
  *,
  update_interval=1,
  consistency="saved",
  forward_view=optimizers.raw,
  backward_view=optimizers.raw,
  read_version=lambda stage, micro_batch, newest: newest,
) -> Result:
  """Runs a timetable to its end.

  Args:
    timetable: Who does what at which tick.
    stages: One `Stage` a worker.
    params: One dict of arrays a worker.
    optimizer: The same for every worker, each with a state of its own.
    loss: `loss(outputs, target) -> (value, gradient)`, at the last stage.
    inputs: `inputs[i]` is micro-batch i.
    targets: `targets[i]` belongs to it.
    update_interval: Micro-batches whose mean gradient makes one update.
    consistency: What the backward of a stage uses. "saved": activations of
      the forward, weights of now. "recompute": both of now, from the saved
      input. "stashed": both of the forward.
    forward_view: What a forward sees of the weights.
    backward_view: What a backward sees of them, unless stashed.
    read_version: The version a forward reads, when the newest is not wanted.
  """
  shape = (len(stages), len(inputs))
  losses = np.full(shape[1], np.nan)
  forward_versions, backward_versions = np.full((2, *shape), -1)
  history = [[(p, optimizer.init(p))] for p in params]
  kept = [{} for _ in stages]  # What a forward leaves for its backward.
  gradients = [[] for _ in stages]  # Of the update being gathered,
  stale_params = [[] for _ in stages]  # and the weights their forwards met.
  # Wire s leads from stage s - 1 to stage s; the errors travel backwards.
  activation_wires = [collections.deque() for _ in stages]
  error_wires = [collections.deque() for _ in stages]
  activation_wires[0].extend(enumerate(inputs))

  for tick in timetable:
    sent = []  # Arrives when the tick is over.

    for s, i in tick.forward.items():
      arrived, x = activation_wires[s].popleft()
      assert arrived == i, f"stage {s} expected {i}, got {arrived}"
      version = read_version(s, i, len(history[s]) - 1)
      weights = forward_view(s, *history[s][version])
      y, saved = stages[s].forward(weights, x)
      kept[s][i] = (weights, x, saved)
      forward_versions[s, i] = version
      if s + 1 < len(stages):
        sent.append((activation_wires[s + 1], (i, y)))
      else:  # The loss turns the micro-batch round at once.
        losses[i], dy = loss(y, targets[i])
        error_wires[s].append((i, dy))

    for s, i in tick.backward.items():
      arrived, dy = error_wires[s].popleft()
      assert arrived == i, f"stage {s} expected {i}, got {arrived}"
      weights_fwd, x, saved = kept[s].pop(i)
      backward_versions[s, i] = len(history[s]) - 1
      if consistency == "stashed":
        weights = weights_fwd
        backward_versions[s, i] = forward_versions[s, i]
      else:
        weights = backward_view(s, *history[s][-1])
        if consistency == "recompute" and stages[s].recompute:
          saved = stages[s].recompute(weights, x, saved)
        elif consistency == "recompute":
          _, saved = stages[s].forward(weights, x)
      grads, dx = stages[s].backward(weights, saved, dy)
      if s > 0:
        sent.append((error_wires[s - 1], (i, dx)))
      gradients[s].append(grads)
      stale_params[s].append(weights_fwd)
      if len(gradients[s]) == update_interval:
        newest, state = history[s][-1]
        history[s].append(
          optimizer.update(
            s, newest, state, _mean(gradients[s]), _mean(stale_params[s])
          )
        )
        gradients[s], stale_params[s] = [], []

    for wire, message in sent:
      wire.append(message)

  newest = [versions[-1][0] for versions in history]
  return Result(losses, newest, forward_versions, backward_versions, history)


def _mean(trees):
  return optimizers.tree_map(lambda *leaves: sum(leaves) / len(leaves), *trees)
