"""Everything a person sees of a run."""
