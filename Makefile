# Thin names for the README's commands.
.PHONY: train test lint

train:
	sh .ci/setup && .venv/bin/python -m experiments.train --workdir=runs/digits

test:
	sh .ci/setup tests && .venv/bin/python -m pytest

lint:
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright
