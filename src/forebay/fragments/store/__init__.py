"""Payloads and rows of fragments on disk."""
