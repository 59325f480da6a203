"""What the outside can see of the daemon: its metrics and the HTTP port that serves them."""
