"""Workers that act in environments: as threads, as processes, or as Ray actors."""
