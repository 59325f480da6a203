"""What measures the daemon, and what wears it down."""
