"""An hour of arriving servers and of faults, and whether the daemon stands it."""
