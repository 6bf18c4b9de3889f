"""What this machine is and can do, and how a process is held to its share of it."""
