"""The HTTP layer below the endpoints: connections, bodies, origins and TLS."""
