"""The page: a run's rollouts, numbers and activities in a browser, read from its folder."""
