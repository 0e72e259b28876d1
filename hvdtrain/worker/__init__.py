"""Runs around the command of every rank. Standard library only."""
