"""A replay store in a database: a SQLite file, or PostgreSQL by URL."""
