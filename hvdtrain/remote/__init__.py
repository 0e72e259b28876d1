"""Reaching other hosts: the user's own OpenSSH, and many hosts at once."""
