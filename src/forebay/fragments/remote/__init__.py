"""A fragment buffer for other processes of the machine."""
