"""Ray: the plain classes as actors, placed on a cluster and kept going."""
