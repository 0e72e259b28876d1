"""Fault drills: kill, stop and slow parts of a job that runs, and measure how it copes."""
