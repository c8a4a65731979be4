"""Tests. Run them with `pytest` from the project's root."""
