"""Ray: the plain classes as actors that are found by name."""
