"""Programs that stand first on horovodrun's PATH, under the names of those that it would call."""
