"""Who takes part: hostfiles, ranges, include and exclude, and which names mean this machine."""
