"""One model on several ranks (FSDP2)."""
