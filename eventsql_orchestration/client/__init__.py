"""The client: one `EventSQL` over one database or several."""
