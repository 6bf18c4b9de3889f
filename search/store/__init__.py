"""Which trials exist and what is known of them, in SQLite or PostgreSQL. `store.Store` is the trial table."""
