"""The built-in jobs that `configs/` uses."""
