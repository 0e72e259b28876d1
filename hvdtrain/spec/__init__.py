"""The job spec: a YAML file, read with positions, checked, and turned into a typed model."""
