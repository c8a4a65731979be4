"""A small run, which the tests of the training program vary."""

from experiments import train

SMALL = train.Config(
  num_stages=5,
  width=8,
  arms=("sgdm", "pb", "pb+lwpvd+scd"),
  seeds=2,
  max_samples=60,
  chunk_samples=20,
  learning_rate=3.0,
)


def quiet(task, done, total):
  del task, done, total
