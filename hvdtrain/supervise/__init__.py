"""Owns every process of a run, its output and its run directory."""
