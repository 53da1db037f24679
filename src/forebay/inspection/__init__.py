"""Looking into buffers and ledgers on disk, for the ``forebay buffer`` and ``forebay ledger`` commands."""
