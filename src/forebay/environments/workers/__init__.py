"""Workers that act in environments: as threads or as processes."""
