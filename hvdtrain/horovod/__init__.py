"""Building, installing and checking Horovod itself."""
