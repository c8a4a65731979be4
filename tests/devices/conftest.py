"""Keeps tests that need eight devices from running on fewer."""

import os

# on_devices_test.py runs them in processes that have so many.
collect_ignore_glob = (
  [] if os.environ.get("PBP_NUM_DEVICES") == "8" else ["on_eight_devices/*"]
)
