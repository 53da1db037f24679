"""When to start groups, and when to stop."""
