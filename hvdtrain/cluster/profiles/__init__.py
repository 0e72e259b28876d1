"""What a cluster should be, as a file of expectations with units, and how its hosts are held against it."""
