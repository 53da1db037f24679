"""The record of a run: what happened to every group, in order, so that the training can be run again."""
