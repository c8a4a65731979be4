"""Programs that train, measure and draw; README.md has what they gave."""
