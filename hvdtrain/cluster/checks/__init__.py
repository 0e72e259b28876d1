"""The checks, by subject: pure functions from the facts of all hosts to findings."""
