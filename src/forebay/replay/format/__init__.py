"""Rollouts as bytes and as Arrow tables: between processes, in a database, in a snapshot."""
