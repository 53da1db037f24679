"""Chat messages and tokens: sessions, the endpoint, and rendering by increments."""
