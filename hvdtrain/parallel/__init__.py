"""Models larger than one worker: the grid of ranks, its process sets, and the layers and schedules that use them."""
